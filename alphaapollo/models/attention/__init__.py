"""Attention backends for padded and packed micro-batches."""
