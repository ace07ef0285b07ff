"""Short answers to questions whose answers were looked up: exact match and F1 after SQuAD's normalisation (1606.05250).

The ground truth is one accepted answer, or several: a JSON list, or {"target": [...]}; the best counts.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter

from alphaapollo.rewards.answer_extraction import marked_answer
from alphaapollo.types import Outcome, Prompt, Score

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def grade(prompt: Prompt, completion: str) -> Score:
    """1 if the answer is an accepted one, else 0; `f1` is shown beside it. Wrong format: an empty answer."""
    exact, f1 = scores(prompt, completion)
    return _score(exact, exact, f1) if f1 >= 0 else _empty()


def grade_f1(prompt: Prompt, completion: str) -> Score:
    """The F1 of words with the best of the accepted answers; `accuracy` is exact match."""
    exact, f1 = scores(prompt, completion)
    return _score(f1, exact, f1) if f1 >= 0 else _empty()


def scores(prompt: Prompt, completion: str) -> tuple[float, float]:
    """(exact match, F1) of what the text marks as its answer, else of the text; F1 is -1 for an empty answer.

    Raises:
        ValueError: no accepted answer.
    """
    truths = accepted(prompt.ground_truth)
    marked = marked_answer(completion)
    answer = completion if marked is None else marked
    if not answer.strip():
        return 0.0, -1.0
    words = normalize(answer)
    return max(float(words == truth) for truth in truths), max(f1_score(words, truth) for truth in truths)


def accepted(truth: str | None) -> list[list[str]]:
    """The words of each accepted answer."""
    try:
        value = json.loads(truth or "")
    except ValueError:
        value = truth
    if isinstance(value, dict):
        value = value.get("target") or []
    answers = value if isinstance(value, list) else [truth if not isinstance(value, str) else value]
    if not (found := [str(answer) for answer in answers if answer is not None and str(answer).strip()]):
        raise ValueError(f"the ground truth {truth!r} has no accepted answer")
    return [normalize(answer) for answer in found]


def normalize(text: str) -> list[str]:
    """Lower case, without punctuation and articles, as words."""
    return ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split()


def f1_score(answer: list[str], truth: list[str]) -> float:
    """Harmonic mean of precision and recall of words; 1 if both have none."""
    if not answer or not truth:
        return float(answer == truth)
    common = (Counter(answer) & Counter(truth)).total()
    return 2 * common / (len(answer) + len(truth))


def _score(reward: float, exact: float, f1: float) -> Score:
    return Score(reward, {"accuracy": exact, "f1": f1})


def _empty() -> Score:
    return Score(0.0, {"accuracy": 0.0, "f1": 0.0}, Outcome.WRONG_FORMAT, "the answer is empty")
