"""Batches of token sequences: rows on ranks, in mini-batches and micro-batches, with shared prompts."""
