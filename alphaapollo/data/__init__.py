"""Read data files, convert them to token sequences, and build the batches of the training ranks.

resolved_files, files                       find the files of a path, folder, glob or hub id, and read their rows
chats, chat_turns, formats                  read chats as people write them, and split them into the turns to train on
prompts, sft_examples, preference_examples  check data rows and convert them to prompts or token sequences
rendering, tool_rendering, control_text     convert chats to tokens with the chat template
cache                                       keep what is computed from many rows for the next start
stream                                      order of the prompts in each epoch
packing, batch                              assign token sequences to mini-batches, ranks and micro-batches
"""
