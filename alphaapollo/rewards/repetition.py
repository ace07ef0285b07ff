"""Repetition reward: the share of distinct 4-grams."""

from __future__ import annotations

import re

from alphaapollo.types import Prompt

NGRAM_LENGTH = 4  # words
UNSPACED = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3"  # scripts without spaces: each character counts as a word
WORD = re.compile(rf"[{UNSPACED}]|[^\W{UNSPACED}]+|[^\w\s]")


def score_distinct_ngrams(prompt: Prompt, completion: str) -> float:
    """Return the share of distinct 4-grams among all 4-grams: 1 without repetition, near 0 for a loop.

    The share equals 1 minus seq-rep-4 of arXiv 1908.04319. Each punctuation mark counts as a word. A text of fewer than
    4 words scores 1.
    """
    words = WORD.findall(completion)
    ngrams = list(zip(*(words[start:] for start in range(NGRAM_LENGTH)), strict=False))
    return len(set(ngrams)) / len(ngrams) if ngrams else 1.0
