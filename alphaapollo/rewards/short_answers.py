r"""Graders of short answers: exact match, words of a search, a number, letters of choices.

`grade_NAME` is the built-in reward function. `answer_NAME` makes an answer from a ground truth, which `grade_NAME` must
score 1. Both raise ValueError for a ground truth that they cannot read."""

from __future__ import annotations

import re
import string
from collections import Counter
from fractions import Fraction

from alphaapollo.rewards.answers import find_answer_tag, find_marked_answer, list_answers, read_accepted_answers
from alphaapollo.rewards.base import make_accuracy_score, make_wrong_format_score
from alphaapollo.types import Outcome, Prompt, Score
from alphaapollo.utils.json_types import JsonObject
from alphaapollo.utils.literals import read_literal

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def grade_exact(prompt: Prompt, completion: str) -> Score:
    """Return a score of 1 if the last `<answer>`, or the text, has exactly the words of an accepted answer, else 0."""
    truth = prompt.ground_truth
    accepted = _read_accepted_answers(truth) + ([str(truth)] if isinstance(truth, str | float) else [])
    answer = find_answer_tag(completion)
    if answer is None and "<answer>" in completion:
        return make_wrong_format_score("<answer> is not closed")
    if not (words := (completion if answer is None else answer).split()):
        return make_wrong_format_score("the answer is empty")
    return make_accuracy_score(words in [text.split() for text in accepted])


def answer_exact(prompt: Prompt) -> str:
    return f"<answer>{_read_accepted_answers(prompt.ground_truth)[0]}</answer>"


def _read_accepted_answers(truth: object, reads_numbers: bool = False) -> list[str]:
    if not (accepted := read_accepted_answers(truth, reads_numbers)):
        raise ValueError(f"the ground truth {truth!r:.200} has no accepted answer. Add reward_model.ground_truth.")
    return accepted


def grade_search(prompt: Prompt, completion: str) -> Score:
    """Return a score of 1 if the normalized answer equals an accepted answer, else 0 (SQuAD, arXiv 1606.05250).

    The component `f1` is the word F1 with the best accepted answer. An empty answer has the wrong format."""
    truths = [normalize_to_words(text) for text in _read_accepted_answers(prompt.ground_truth, reads_numbers=True)]
    marked = find_marked_answer(completion)
    answer = completion if marked is None else marked
    if not answer.strip():
        return Score(0.0, {"accuracy": 0.0, "f1": 0.0}, Outcome.WRONG_FORMAT, "the answer is empty")
    words = normalize_to_words(answer)
    exact, f1 = float(words in truths), max(f1_score(words, truth) for truth in truths)
    return Score(exact, {"accuracy": exact, "f1": f1})


def grade_search_f1(prompt: Prompt, completion: str) -> Score:
    """Return the word F1 with the best accepted answer as the score; its component `accuracy` is exact match."""
    score = grade_search(prompt, completion)
    return Score(score.components["f1"], score.components, score.outcome, score.reason)


def answer_search(prompt: Prompt) -> str:
    return f"<answer>{_read_accepted_answers(prompt.ground_truth, reads_numbers=True)[0]}</answer>"


answer_search_f1 = answer_search


def normalize_to_words(text: str) -> list[str]:
    """Return the lower-case words of a text, without punctuation and articles (SQuAD normalization)."""
    return ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split()


def f1_score(answer: list[str], truth: list[str]) -> float:
    """Return the F1 of the words of an answer, the harmonic mean of precision and recall; 1 if both are empty."""
    if not answer or not truth:
        return float(answer == truth)
    common = (Counter(answer) & Counter(truth)).total()
    return 2 * common / (len(answer) + len(truth))


LATEX_FRACTION = re.compile(r"\\[dt]?frac\s*\{\s*(-?\d+)\s*\}\s*\{\s*(\d+)\s*\}")
MAX_DIGITS = 200  # bounds degenerate repetition; Python refuses to parse numbers of thousands of digits
THOUSANDS = re.compile(
    r"(?<=\d)(?:,?\\!\s*|\\[,;]\s*|\\thinspace\s*|,\\q?quad\s*|(?:\\text)?\{,\}|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))"
)  # 1{,}000
SPACED = re.compile(r"(?<![\d.,])\d{1,3}(?: \d{3})+(?!\d)")  # 1 000, in marked answers; elsewhere, it may be two
POWER_OF_TEN = re.compile(r"(?<=\d)\s*(?:\\times|\\cdot|\u00d7|\*)\s*10\s*(?:\^|\*\*)\s*+\{?\s*+([-+]?\d+)\s*\}?")
DATE = re.compile(r"\b\d{4}-(?:0[1-9]|1[0-2])(?:-\d{2})?\b(?!\s*=)")  # neither a number nor a subtraction
UNSIGNED = r"(?:(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?)"
# A minus sign belongs to the number unless it subtracts (5-3, x-3). A currency sign may follow the minus sign.
NUMBER = re.compile(rf"((?<![\w.)\]])-)?\s?\\?[$€£]?\s?({UNSIGNED})(?:/({UNSIGNED}))?")


def grade_gsm8k(prompt: Prompt, completion: str) -> Score:
    """Return a score of 1 if the final numbers of completion and an accepted answer are equal, else 0: as exact
    fractions, so that `1,200`, `$1200.00`, `1.2e3` and `2400/2` are equal. A completion without a number has the wrong
    format."""
    accepted = _read_accepted_numbers(prompt.ground_truth)
    answer = read_final_number(completion)
    if answer is None:
        return make_wrong_format_score("no number in the answer")
    return make_accuracy_score(answer in accepted)


def answer_gsm8k(prompt: Prompt) -> str:
    return f"#### {_read_accepted_numbers(prompt.ground_truth)[0]}"


def _read_accepted_numbers(truth: object) -> list[Fraction]:
    texts = read_accepted_answers(truth, reads_numbers=True)
    if not (numbers := [number for text in texts if (number := read_final_number(text)) is not None]):
        raise ValueError(f"the ground truth {truth!r:.200} has no number")
    return numbers


def read_final_number(text: str) -> Fraction | None:
    """Return the last number of the marked answer, or of a text without a marked answer; None without a number."""
    marked = find_marked_answer(text)
    if marked is not None:
        marked = SPACED.sub(lambda number: number[0].replace(" ", ""), marked)
    answer = LATEX_FRACTION.sub(r"\1/\2", text if marked is None else marked)
    answer = POWER_OF_TEN.sub(r"e\1", THOUSANDS.sub("", answer))
    numbers = NUMBER.findall(DATE.sub("", answer))
    return _parse_fraction(*numbers[-1]) if numbers else None


def _parse_fraction(sign: str, numerator: str, denominator: str) -> Fraction | None:
    """Return the value of a number in three parts, e.g. ("-", "1,000", "3"); None if it is too long or divides by 0."""
    if _count_digits(numerator) + _count_digits(denominator) > MAX_DIGITS:
        return None
    value = Fraction(numerator.replace(",", ""))
    divisor = Fraction(denominator.replace(",", "") or 1)
    if divisor == 0:
        return None
    return -value / divisor if sign else value / divisor


def _count_digits(number: str) -> int:
    """Return an upper bound of the number of digits when `number` is written without exponent, e.g. 4 for `1e3`."""
    mantissa, _, exponent = number.lower().partition("e")
    if len(exponent) > len(str(MAX_DIGITS)) + 1:
        return MAX_DIGITS + 1
    return len(mantissa) + abs(int(exponent or 0))


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


def grade_multiple_choice(prompt: Prompt, completion: str) -> Score:
    """Return a score of 1 if the completion chooses exactly the letters of the ground truth, else 0."""
    truth = _read_letters_of_truth(prompt)
    chosen = find_chosen_letters(completion)
    return make_accuracy_score(chosen == truth) if chosen else make_wrong_format_score("no letter is chosen")


def answer_multiple_choice(prompt: Prompt) -> str:
    return f"<answer>{', '.join(_read_letters_of_truth(prompt))}</answer>"


def find_chosen_letters(text: str) -> str:
    """Return the letters marked by <answer>, box or ####, else after "answer is", else at the start of the last line.
    The letters are in order: `AC`; empty if no letter is chosen."""
    marked = find_marked_answer(text)
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


def _read_letters_of_truth(prompt: Prompt) -> str:
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
