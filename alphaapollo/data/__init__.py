"""Data: files to token rows, and rows to the batches of training ranks.

files -> prompts, sft_examples         rows of parquet or jsonl, checked
rendering, tool_rendering              chats to tokens by the tokenizer's template
stream                                 order of prompts as a function of seed, epoch and index
packing -> batch                       distribution of rows to mini-batches, ranks and micro-batches; batch types
"""
