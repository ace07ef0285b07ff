"""The answer must be the ground truth, word for word (white space aside)."""

from __future__ import annotations

from alphaapollo.rewards.answer_extraction import answer_tag
from alphaapollo.types import Outcome, Prompt, Score


def grade(prompt: Prompt, completion: str) -> Score:
    """1 if the last `<answer>` tag, or the whole text where there is none, equals the ground truth, else 0.

    Wrong format: an `<answer>` that is not closed, or an empty answer.
    """
    if prompt.ground_truth is None:
        raise ValueError("the prompt has no ground truth")
    answer = answer_tag(completion)
    if answer is None:
        if "<answer>" in completion:
            return _unreadable("<answer> is not closed")
        answer = completion
    if not answer.strip():
        return _unreadable("the answer is empty")
    accuracy = float(answer.split() == prompt.ground_truth.split())
    return Score(accuracy, {"accuracy": accuracy})


def _unreadable(reason: str) -> Score:
    return Score(0.0, {"accuracy": 0.0}, Outcome.WRONG_FORMAT, reason)
