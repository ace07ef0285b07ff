"""Language-consistency reward: question, thoughts and answer in one language (arXiv 2506.10910, section 2.2.4).

Importing this module loads the classifier's model.
"""

from __future__ import annotations

import re

from py3langid.langid import MODEL_FILE, LanguageIdentifier

from alphaapollo.rewards.base import get_question
from alphaapollo.rewards.text_components import split_thoughts
from alphaapollo.types import Prompt

# Subset of the classifier's 139 languages: it mistakes short texts for related languages (Wu, Malay, Nigerian Pidgin).
LANGUAGES = (
    "ar az bg bn ca cs da de el en es et eu fa fi fr gu he hi hr hu hy id it ja ka kk kn ko lt lv ml mr nl no pa pl pt "
    "ro ru sk sl sr sv sw ta te th tl tr uk ur vi zh"
)
MIN_LETTERS = 40  # shorter texts are not classified; with 40 letters, 99.9 % of English solutions are recognized
DENSE = re.compile("[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3]")  # kana, ideographs, hangul
DENSITY = 5  # number of letters that one DENSE character counts as
NOT_PROSE = re.compile(
    r"""
    ```.*?(?:```|\Z)                                       # code
    | `[^`\n]*`
    | \$\$[^$]*\$\$                                        # LaTeX
    | \$(?=\S)[^$\n]*(?<=\S)\$(?!\d)                       # ... but "$5 and $10" are prices
    | \\\[(?:(?!\\[\[\]]).)*\\\]
    | \\\((?:(?!\\[()]).)*\\\)
    | \\begin\{(?:(?!\\begin\{|\\end\{).)*\\end\{\w+\*?\}
    | \\[a-zA-Z]+
    | </?\w+>                                              # tags
    | [!-&(-@\[-`{-~]                                      # digits, punctuation other than apostrophes
    """,
    re.VERBOSE | re.DOTALL,
)

IDENTIFIER = LanguageIdentifier.from_model_file(MODEL_FILE)
IDENTIFIER.set_languages(LANGUAGES.split())


def score_language(prompt: Prompt, completion: str) -> float:
    """Return 1 if the user's messages, the thoughts and the answer are in the same language, else 0. LaTeX, code and
    parts with fewer than MIN_LETTERS letters are ignored. If both thoughts and answer are ignored, the result is 0."""
    thoughts, answer = split_thoughts(completion)
    languages = {detect_language(thoughts), detect_language(answer)} - {None}
    return float(len(languages) == 1 and detect_language(get_question(prompt)) in {*languages, None})


def detect_language(text: str) -> str | None:
    """Return the ISO 639-1 code of the main language of a text, or None for fewer than MIN_LETTERS letters."""
    words = extract_prose(text)
    letters = sum(map(str.isalpha, words)) + (DENSITY - 1) * len(DENSE.findall(words))
    return str(IDENTIFIER.classify(words)[0]) if letters >= MIN_LETTERS else None


def extract_prose(text: str) -> str:
    """Remove code, LaTeX, tags, numbers and punctuation from a text."""
    return " ".join(NOT_PROSE.sub(" ", text).split())
