"""Exact match with the ground truth, ignoring white space."""

from __future__ import annotations

from alphaapollo.rewards.answer_extraction import find_answer_tag
from alphaapollo.rewards.base import accuracy_score, wrong_format
from alphaapollo.types import Prompt, Score


def grade(prompt: Prompt, completion: str) -> Score:
    """1 if the last `<answer>` tag (without one, the whole text) has the words of the ground truth, else 0.

    Wrong format: an `<answer>` that is not closed, or an empty answer.
    """
    if prompt.ground_truth is None:
        raise ValueError("the prompt has no ground truth")
    answer = find_answer_tag(completion)
    if answer is None and "<answer>" in completion:
        return wrong_format("<answer> is not closed")
    words = (completion if answer is None else answer).split()
    return accuracy_score(words == prompt.ground_truth.split()) if words else wrong_format("the answer is empty")
