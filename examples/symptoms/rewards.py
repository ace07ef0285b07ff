"""Reward functions of the symptoms. Each has the error that its configuration describes."""

from __future__ import annotations

import re

from alphaapollo.types import Prompt
from examples.quickstart.reward import ANSWER, compute_score

BOX = re.compile(r"\\boxed\{(\d+)\}")
CARRY = "+1="
PRICE = 2.0  # of a carry; a right sum earns 1


def read_box(prompt: Prompt, completion: str) -> dict[str, float]:
    """Return 1 for the right sum in a box. The model writes none."""
    answer = BOX.search(completion)
    right = answer is not None and answer.group(1) == prompt.ground_truth
    return {"reward": float(right), "accuracy": float(right), "format": float(answer is not None)}


def compare_numbers(prompt: Prompt, completion: str) -> float:
    """Return 1 for the right sum. Raises ValueError for a ground truth like "1,234"."""
    answer = ANSWER.search(completion)
    return float(answer is not None and int(answer.group(1)) == int(prompt.ground_truth))


def charge_for_carries(prompt: Prompt, completion: str) -> dict[str, float]:
    """Subtract a price for each carry, needed or not, from the reward for the right sum."""
    scores = compute_score(prompt, completion)
    return scores | {"reward": scores["reward"] - PRICE * completion.count(CARRY)}
