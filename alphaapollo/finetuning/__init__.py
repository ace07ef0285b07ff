"""Training on given texts, without engines: a skeleton, and a kind of fine-tuning a file on it (sft.py)."""
