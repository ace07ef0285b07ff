"""The reward: 1 if the answer follows the instruction, else 0."""

from __future__ import annotations

from alphaapollo.types import Prompt
from examples.smollm2.task import Instruction


def compute_score(prompt: Prompt, completion: str) -> dict[str, float]:
    """Return the reward. It equals `accuracy`."""
    correct = float(Instruction(**prompt.ground_truth).is_followed_by(completion))
    return {"reward": correct, "accuracy": correct}
