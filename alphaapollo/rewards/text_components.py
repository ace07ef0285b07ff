r"""Reward components of a text: its format, `<think>...</think>` and `<answer>...</answer>` or `\boxed{...}`, and the
share of distinct 4-grams."""

from __future__ import annotations

import re

from alphaapollo.rewards.answer_extraction import find_answer_tag, find_boxed
from alphaapollo.types import Prompt

NGRAM_LENGTH = 4  # words
UNSPACED = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3"  # scripts without spaces: each character counts as a word
WORD = re.compile(rf"[{UNSPACED}]|[^\W{UNSPACED}]+|[^\w\s]")


def split_thoughts(text: str) -> tuple[str, str]:
    """Split a completion at `</think>` into (thoughts, answer). Without `</think>`, a text that contains `<think>` is
    all thoughts, and any other text is all answer."""
    before, closed, after = text.partition("</think>")
    if not closed and "<think>" not in text:
        return "", text
    return before.replace("<think>", ""), after


def score_format(prompt: Prompt, completion: str) -> float:
    """Return 1 if a completion is one `<think>...</think>` followed by one answer, else 0.

    An answer is one non-empty `<answer>...</answer>`. In a text without answer tags, it is a boxed expression
    (arXiv 2506.10910, section 2.2.1).
    """
    text = completion.lstrip()
    return score_format_without_opening_tag(prompt, text.removeprefix("<think>")) if text.startswith("<think>") else 0.0


def score_format_without_opening_tag(prompt: Prompt, completion: str) -> float:
    """Return `score_format` of `<think>` + completion, for chat templates that end the prompt with `<think>`."""
    if "<think>" in completion or completion.count("</think>") != 1:
        return 0.0
    _, answer = split_thoughts(completion)
    tags = (answer.count("<answer>"), answer.count("</answer>"))
    if tags == (0, 0):
        return float(bool(find_boxed(answer)))
    return float(tags == (1, 1) and bool(find_answer_tag(answer)))


def score_distinct_ngrams(prompt: Prompt, completion: str) -> float:
    """Return the share of distinct 4-grams among all 4-grams: 1 without repetition, near 0 for a loop.

    The share equals 1 minus seq-rep-4 of arXiv 1908.04319. Each punctuation mark counts as a word. A text of fewer than
    4 words scores 1.
    """
    words = WORD.findall(completion)
    ngrams = list(zip(*(words[start:] for start in range(NGRAM_LENGTH)), strict=False))
    return len(set(ngrams)) / len(ngrams) if ngrams else 1.0
