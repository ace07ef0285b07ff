"""Graders of short answers to search questions: exact match and F1 after SQuAD normalization (arXiv 1606.05250).

The ground truth is one accepted answer or several (see accepted_answers). The best match counts.
"""

from __future__ import annotations

import re
import string
from collections import Counter

from alphaapollo.rewards.accepted_answers import read_accepted_answers
from alphaapollo.rewards.answer_extraction import find_marked_answer
from alphaapollo.types import Outcome, Prompt, Score

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def grade(prompt: Prompt, completion: str) -> Score:
    """Return a score of 1 if the normalized answer equals an accepted answer, else 0.

    The component `f1` is the word F1 with the best accepted answer. An empty answer has the wrong format. Raises
    ValueError if the ground truth has no accepted answer.
    """
    truths = [normalize_to_words(text) for text in _read_accepted_answers(prompt.ground_truth)]
    marked = find_marked_answer(completion)
    answer = completion if marked is None else marked
    if not answer.strip():
        return Score(0.0, {"accuracy": 0.0, "f1": 0.0}, Outcome.WRONG_FORMAT, "the answer is empty")
    words = normalize_to_words(answer)
    exact, f1 = float(words in truths), max(f1_score(words, truth) for truth in truths)
    return Score(exact, {"accuracy": exact, "f1": f1})


def grade_f1(prompt: Prompt, completion: str) -> Score:
    """Return the word F1 with the best accepted answer as the score; its component `accuracy` is exact match."""
    score = grade(prompt, completion)
    return Score(score.components["f1"], score.components, score.outcome, score.reason)


def answer_from_truth(prompt: Prompt) -> str:
    """Return an answer that `grade` must score 1. Raises ValueError for an unreadable ground truth."""
    return f"<answer>{_read_accepted_answers(prompt.ground_truth)[0]}</answer>"


def _read_accepted_answers(truth: object) -> list[str]:
    if not (accepted := read_accepted_answers(truth, reads_numbers=True)):
        raise ValueError(f"the ground truth {truth!r:.200} has no accepted answer")
    return accepted


def normalize_to_words(text: str) -> list[str]:
    """Return the lower-case words of a text, without punctuation and articles (SQuAD normalization)."""
    return ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split()


def f1_score(answer: list[str], truth: list[str]) -> float:
    """Return the F1 of the words of an answer, the harmonic mean of precision and recall; 1 if both are empty."""
    if not answer or not truth:
        return float(answer == truth)
    common = (Counter(answer) & Counter(truth)).total()
    return 2 * common / (len(answer) + len(truth))
