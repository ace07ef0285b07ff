"""Reinforcement-learning post-training for language models: see README.md, then docs/architecture.md."""

__version__ = "0.1.0"
