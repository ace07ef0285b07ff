"""How little a text repeats itself."""

from __future__ import annotations

import re

from alphaapollo.types import Prompt

LENGTH = 4  # words
UNSPACED = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3"  # scripts in which a sign counts as a word
WORD = re.compile(rf"[{UNSPACED}]|[^\W{UNSPACED}]+|[^\w\s]")


def distinct_ngrams(prompt: Prompt, completion: str) -> float:
    """Different 4-grams of words over all 4-grams: 1 where none comes twice, towards 0 for a loop.

    This is 1 minus seq-rep-4 of arXiv 1908.04319, on words and punctuation marks. A text of fewer than 4 has no 4-gram
    to repeat: 1.
    """
    words = WORD.findall(completion)
    ngrams = list(zip(*(words[start:] for start in range(LENGTH)), strict=False))
    return len(set(ngrams)) / len(ngrams) if ngrams else 1.0
