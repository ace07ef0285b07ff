"""Reward function for runs without rewards, and for runs with no other reward than a reward model's."""

from __future__ import annotations

from alphaapollo.types import Prompt


def zero_reward(prompt: Prompt, completion: str) -> float:
    """Return a reward of 0 for every completion."""
    return 0.0
