"""Read data files, convert them to token sequences, and build the batches of the training ranks.

files                                       read parquet, jsonl and json files
prompts, sft_examples, preference_examples  check data rows and convert them to prompts or token sequences
rendering, tool_rendering                   convert chats to tokens with the chat template
stream                                      order of the prompts in each epoch
packing, batch                              assign token sequences to mini-batches, ranks and micro-batches
"""
