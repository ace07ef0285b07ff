"""Attention over padded or packed micro-batches."""
