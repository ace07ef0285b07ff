"""From files to token rows, and from rows to what a rank computes on.

files -> prompts, sft_examples         rows of parquet or jsonl, checked
rendering, tool_rendering              chats to tokens by the tokenizer's template
stream                                 which prompts come now: a function of seed, epoch and index
packing -> batch                       rows dealt to mini-batches, ranks and micro-batches; the types that travel
"""
