"""Grader for exact match with the ground truth or one of several accepted answers, ignoring white space."""

from __future__ import annotations

from alphaapollo.rewards.accepted_answers import read_accepted_answers
from alphaapollo.rewards.answer_extraction import find_answer_tag
from alphaapollo.rewards.base import make_accuracy_score, make_wrong_format_score
from alphaapollo.types import Prompt, Score


def grade(prompt: Prompt, completion: str) -> Score:
    """Return a score of 1 if the answer has exactly the words of an accepted answer, else 0.

    The answer is the content of the last `<answer>` tag, or the complete text if there is no such tag. An unclosed tag
    and an empty answer have the wrong format.
    """
    accepted = _read_accepted_answers(prompt.ground_truth)
    answer = find_answer_tag(completion)
    if answer is None and "<answer>" in completion:
        return make_wrong_format_score("<answer> is not closed")
    if not (words := (completion if answer is None else answer).split()):
        return make_wrong_format_score("the answer is empty")
    return make_accuracy_score(words in [one.split() for one in accepted])


def answer_from_truth(prompt: Prompt) -> str:
    """Return an answer that `grade` must score 1. Raises ValueError for an unreadable ground truth."""
    return f"<answer>{_read_accepted_answers(prompt.ground_truth)[0]}</answer>"


def _read_accepted_answers(truth: object) -> list[str]:
    """Return the accepted answers, and the ground truth as it is written: '["a"]', 12.0. Raises ValueError if there is
    none."""
    if not (accepted := read_accepted_answers(truth)):
        raise ValueError(f"there is no ground truth ({truth!r}). Add reward_model.ground_truth to the row.")
    return [*accepted, str(truth)] if isinstance(truth, str | float) else accepted
