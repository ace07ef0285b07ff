"""Grader for exact match with the ground truth, ignoring white space."""

from __future__ import annotations

from alphaapollo.rewards.answer_extraction import find_answer_tag
from alphaapollo.rewards.base import make_accuracy_score, make_wrong_format_score
from alphaapollo.types import Prompt, Score


def grade(prompt: Prompt, completion: str) -> Score:
    """Return a score of 1 if the answer has exactly the words of the ground truth, else 0.

    The answer is the content of the last `<answer>` tag, or the complete text if there is no such tag. An unclosed tag
    and an empty answer have the wrong format.
    """
    if prompt.ground_truth is None:
        raise ValueError("the prompt has no ground truth. Add reward_model.ground_truth to its row.")
    answer = find_answer_tag(completion)
    if answer is None and "<answer>" in completion:
        return make_wrong_format_score("<answer> is not closed")
    if not (words := (completion if answer is None else answer).split()):
        return make_wrong_format_score("the answer is empty")
    return make_accuracy_score(words == prompt.ground_truth.split())
