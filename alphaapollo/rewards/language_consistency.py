"""Whether question, thoughts and answer are in one language (arXiv 2506.10910, section 2.2.4).

Imported only where it grades: the classifier's model is loaded with this module.
"""

from __future__ import annotations

import re

from py3langid.langid import MODEL_FILE, LanguageIdentifier

from alphaapollo.rewards.think_format import split_thoughts
from alphaapollo.types import Prompt

# The classifier knows 139, among them near relatives that it takes short texts for (Wu, Malay, Nigerian Pidgin).
LANGUAGES = (
    "ar az bg bn ca cs da de el en es et eu fa fi fr gu he hi hr hu hy id it ja ka kk kn ko lt lv ml mr nl no pa pl pt "
    "ro ru sk sl sr sv sw ta te th tl tr uk ur vi zh"
)
MIN_LETTERS = 40  # below, a text is not judged: English solutions of 40 and more are right in 99.9 % of cases
DENSE = re.compile("[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3]")  # kana, ideographs, hangul: ...
DENSITY = 5  # ... each says as much as so many letters
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


def same_language(prompt: Prompt, completion: str) -> float:
    """1 if question (the user's messages), thoughts and answer are in the same language, else 0.

    LaTeX and code do not count. A part with too few words to tell its language is passed over; if both thoughts and
    answer are such, 0.
    """
    thoughts, answer = split_thoughts(completion)
    spoken = {language(thoughts), language(answer)} - {None}
    return float(len(spoken) == 1 and language(question(prompt)) in {*spoken, None})


def question(prompt: Prompt) -> str:
    """What the user asks; a text that the model continues is all question."""
    if isinstance(prompt.content, str):
        return prompt.content
    return "\n".join(message["content"] for message in prompt.content if message["role"] == "user")


def language(text: str) -> str | None:
    """ISO 639-1 code of the language that most of a text is in; None = too little prose."""
    words = prose(text)
    letters = sum(map(str.isalpha, words)) + (DENSITY - 1) * len(DENSE.findall(words))
    return str(IDENTIFIER.classify(words)[0]) if letters >= MIN_LETTERS else None


def prose(text: str) -> str:
    """The words: without code, LaTeX, tags, numbers and punctuation."""
    return " ".join(NOT_PROSE.sub(" ", text).split())
