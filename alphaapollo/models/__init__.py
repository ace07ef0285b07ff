"""Language models with FSDP2: loading, forward passes, training state, checkpoints and export.

load.py and lora.py load a transformers model, policy.py wraps it, and sharding.py shards it. micro_batch.py builds the
tensors of a forward pass. decoder.py and attention.py compute hidden states, and lm_head.py computes log-probs.
ulysses.py and expert_parallel.py exchange tokens between the ranks that share a sequence, or the experts.
"""
