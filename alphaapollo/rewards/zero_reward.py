"""Reward function for runs in which a reward model alone, or a teacher alone, provides the training signal."""

from __future__ import annotations

from alphaapollo.types import Prompt


def zero_reward(prompt: Prompt, completion: str) -> float:
    """Return 0."""
    return 0.0
