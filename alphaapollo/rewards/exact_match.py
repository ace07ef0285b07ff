"""Grader for exact match with the ground truth, ignoring white space."""

from __future__ import annotations

from alphaapollo.rewards.answer_extraction import find_answer_tag
from alphaapollo.rewards.base import score_accuracy, score_wrong_format
from alphaapollo.types import Prompt, Score


def grade(prompt: Prompt, completion: str) -> Score:
    """Score 1 if the answer has exactly the words of the ground truth, else 0.

    The answer is the last `<answer>` tag, or the complete text without such a tag. An unclosed tag and an empty answer
    have the wrong format.
    """
    if prompt.ground_truth is None:
        raise ValueError("the prompt has no ground truth")
    answer = find_answer_tag(completion)
    if answer is None and "<answer>" in completion:
        return score_wrong_format("<answer> is not closed")
    words = (completion if answer is None else answer).split()
    return score_accuracy(words == prompt.ground_truth.split()) if words else score_wrong_format("the answer is empty")
