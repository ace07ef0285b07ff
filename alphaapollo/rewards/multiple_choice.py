r"""Grader of multiple-choice questions: the answer is a letter from A to Z, or a set of them (`A, C`, `AC`)."""

from __future__ import annotations

import re

from alphaapollo.rewards.accepted_answers import list_answers
from alphaapollo.rewards.answer_extraction import find_adjacent_boxes, find_marked_answer
from alphaapollo.rewards.base import make_accuracy_score, make_wrong_format_score
from alphaapollo.types import Prompt, Score
from alphaapollo.utils.json_types import JsonObject
from alphaapollo.utils.literals import read_literal

# `B`, `(b)`, `B. Paris`, `Option B: Paris`, `B is correct`; a lower-case letter in brackets or alone ("a" is a word)
LETTER = re.compile(
    r"\s*(?:[Oo]ption\s+|[Cc]hoice\s+)?(?:[(\[]\s*([A-Za-z])\s*[)\]]|([A-Z])(?=\s*(?:[.):,]|$|\n))"
    r"|([A-Za-z])(?=\s+is\s+(?:the\s+)?(?:correct|right|best|answer)\b|\)|\.?\s*$))",
    re.ASCII,
)
# `A, C`, `(A) and (C)`, `["A", "C"]`, `ABD`; not `B, because A is wrong`
SEVERAL = re.compile(
    r"[\s()\[\]\"'\\]*+([A-Za-z](?:(?:[\s,;/&+|()\[\]\"'\\]|and\b)++[A-Za-z]\b)++|[A-J]{2,10}\b)"
    r"(?=[^\w\n]*+(?:$|\n|are\b)|\s*[.:;!]|\s+(?:because|since)\b)",
    re.ASCII,
)
PARTS, LABEL = re.compile(r"[,;\n]|\band\b"), re.compile(r"\s*\(?([A-Z])[.):]\s*\w")  # `A. Paris, C. Rome`
LATEX = re.compile(r"\\(?:text(?:bf|rm)?|math(?:bf|rm)|boxed)\s*|[{}$*]")
STATED = re.compile(
    r"(?i:answers?|choices?|options?)(?:\s++(?i:is|are|should be|would be))?(?:\s*+:\s++|\s++)"
    r"(?=(?:[(\[]\s*+)?(?:[A-Za-z]|[A-J]{2,10})\b)"
)
MAX_CHOICE = 100  # characters after "the answer is" that are read


def grade(prompt: Prompt, completion: str) -> Score:
    """Return a score of 1 if the completion chooses exactly the letters of the ground truth, else 0. A completion that
    chooses no letter has the wrong format. Raises ValueError for a ground truth that names no choice."""
    truth = _read_truth(prompt)
    chosen = find_chosen_letters(completion)
    return make_accuracy_score(chosen == truth) if chosen else make_wrong_format_score("no letter is chosen")


def answer_from_truth(prompt: Prompt) -> str:
    """Return an answer that `grade` must score 1. Raises ValueError for an unreadable ground truth."""
    return f"<answer>{', '.join(_read_truth(prompt))}</answer>"


def find_chosen_letters(text: str) -> str:
    """Return the letters marked by <answer>, box or ####, else after "answer is", else at the start of the last line.
    The letters are in order: `AC`; empty if no letter is chosen."""
    marked = find_adjacent_boxes(text) or find_marked_answer(text)
    if marked is not None:
        return read_letters(marked) or _find_stated_letters(marked)
    lines = text.strip().splitlines()
    return _find_stated_letters(text) or (read_letters(lines[-1]) if lines else "")


def read_letters(text: str) -> str:
    """Return the choice letters at the start of a text, in order; empty if the text starts with anything else."""
    bare = LATEX.sub("", text).strip()
    if several := SEVERAL.match(bare):
        letters = [letter for letter in several[1].replace("and", "").upper() if letter.isalpha()]
        return "".join(sorted(letters)) if len(set(letters)) == len(letters) else ""
    labels = [LABEL.match(part) for part in PARTS.split(bare)]
    if len(labels) > 1 and all(labels):
        return "".join(sorted({label[1] for label in labels if label}))
    found = LETTER.match(bare)
    return (found[1] or found[2] or found[3]).upper() if found else ""


def _find_stated_letters(text: str) -> str:
    """Return the letters after the last "answer", "choice" or "option" that letters follow, e.g. "the answer is B"."""
    bare = LATEX.sub("", text)
    ends = [stated.end() for stated in STATED.finditer(bare)]
    letters = (read_letters(bare[end : end + MAX_CHOICE].split("\n")[0]) for end in reversed(ends))
    return next(filter(None, letters), "")


def _read_truth(prompt: Prompt) -> str:
    """Return the letters of the right choices, in order. Raises ValueError if the ground truth names no choice."""
    choices = _list_choices(prompt.extra_info)
    letters = [_read_choice(answer, choices) for answer in list_answers(prompt.ground_truth) if answer is not None]
    if not letters or not all(letters):
        raise ValueError(
            f"the ground truth {prompt.ground_truth!r:.200} is not a letter from A to Z. Add a column `choices` "
            f"(or `options`), so that an index from 0, a label or a text is found in it ({len(choices)} choices found)."
        )
    return "".join(sorted(set("".join(letters))))


def _read_choice(answer: object, choices: list[tuple[str, str]]) -> str:
    """Return the letters of one answer of a ground truth: letters, the label or the text of a choice, or an index."""
    letters = [
        label.upper() if LETTER.fullmatch(label) else chr(65 + index) for index, (label, _) in enumerate(choices)
    ]
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        return letters[int(answer)] if answer in range(len(letters)) else ""
    if not isinstance(answer, str):
        return ""
    text = answer.strip()
    named = [letters[index] for index, choice in enumerate(choices) if text in choice]
    return named[0] if len(named) == 1 else read_letters(answer)


def _list_choices(columns: JsonObject) -> list[tuple[str, str]]:
    """Return label and text of each choice: of a list, {"A": text}, or {"label": [...], "text": [...]} as in ARC."""
    value = columns.get("choices", columns.get("options"))
    if isinstance(value, str):
        value = read_literal(value, has_answers=True)
    if isinstance(value, dict):
        pairs = zip(value["label"], value["text"], strict=True) if {"label", "text"} <= value.keys() else value.items()
        return [(str(label).strip(), str(text).strip()) for label, text in pairs]
    texts = value if isinstance(value, list | tuple) else []
    return [(chr(65 + index), str(text).strip()) for index, text in enumerate(texts)]
