"""Read data files, and convert their rows to prompts and token sequences.

files, formats                          find the files of an entry, read their rows, and recognize common formats
chats, image_messages, images           read chats and their images as people write them
prompts, examples, preference_examples  check data rows and convert them to prompts or token sequences
rendering, tool_rendering, vocabulary   convert chats to tokens with the chat template
turns                                   split chats into the turns to train on
cache                                   keep what has been read for the next start
stream                                  order of the prompts in each epoch
"""
