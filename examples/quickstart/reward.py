"""The quickstart's reward: 1 for the right sum in an answer tag at the end of the text, else 0."""

from __future__ import annotations

import re

from alphaapollo.types import Prompt

ANSWER = re.compile(r"<answer>(\d+)</answer>\s*$")


def compute_score(prompt: Prompt, completion: str) -> dict[str, float]:
    """Return the reward. It equals `accuracy`; `format` is only logged."""
    answer = ANSWER.search(completion)
    right = answer is not None and answer.group(1) == prompt.ground_truth
    return {"reward": float(right), "accuracy": float(right), "format": float(answer is not None)}
