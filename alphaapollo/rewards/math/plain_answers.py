r"""Answers that need no algebra: numbers, letters of multiple choice, words, units, clock times and ratios.

Each function gets two tidy answers (rewards.math.latex) and says True or False, or None where they are not of its kind.
"""

from __future__ import annotations

import re
from fractions import Fraction

from alphaapollo.rewards.math.latex import plain

LETTER = re.compile(r"\(?\s*([A-J])\s*\)?\.?")
LETTER_IN_BRACKETS = re.compile(r"\(\s*([A-J])\s*\)\s")  # and the choice's text
LETTER_FIRST = re.compile(r"(?:option|choice)?\s*(?:\(\s*([A-J])\s*\)|([A-J])(?=\s*[.):]|$))", re.IGNORECASE)
LETTERS = re.compile(r"\(?[A-J](?:(?:\s*,|\s+and\b|\s*&)\s*(?:and\s+)?[A-J])+\)?")
BASED = re.compile(r"(\w+)\s*_\s*\{?(\d+)\}?")
PLAIN_NUMBER = re.compile(r"[-+]?(?:\d{1,40}(?:\.\d{0,40})?|\.\d{1,40})", re.ASCII)
CLOCK = re.compile(r"(\d{1,2}):(\d{2})\s*(?:([ap])\.?\s*m\.?)?", re.IGNORECASE)
RATIO = re.compile(r"\d+(?:\.\d+)?(?:\s*:\s*\d+(?:\.\d+)?)+")
WORD = re.compile(r"[^\W\d_]{3,}")
FILLERS = {"a", "an", "the"}
SAME_WORDS = {
    "does not exist": "none", "dne": "none", "undefined": "none", "no solution": "none", "no solutions": "none",
    "no real solution": "none", "no real solutions": "none", r"\emptyset": "none", "empty set": "none",
    "all real numbers": r"\mathbb{r}", "all reals": r"\mathbb{r}", r"(-\infty,\infty)": r"\mathbb{r}",
}  # fmt: skip
UNITS = {
    alias: unit
    for unit, aliases in {
        "mm": "mm millimeter millimetre", "cm": "cm centimeter centimetre", "m": "m meter metre",
        "km": "km kilometer kilometre", "in": "in inch inche", "ft": "ft foot feet", "yd": "yd yard", "mi": "mi mile",
        "g": "g gram", "kg": "kg kilogram", "lb": "lb pound", "oz": "oz ounce", "ml": "ml milliliter millilitre",
        "l": "l liter litre", "s": "s sec second", "min": "min minute", "h": "h hr hour", "day": "day",
        "week": "week", "month": "month", "year": "year yr", "cent": "cent", "dollar": "dollar usd", "euro": "euro eur",
    }.items()
    for alias in aliases.split()
}  # fmt: skip
NUMBER = r"[-+]?\s*(?:\d[\d,]*\.?\d*|\.\d+)(?:\s*/\s*\d+)?"
POWER = r"\^\s*\{?-?\d\}?"
TEXT_UNIT = re.compile(
    rf"(.*?[\w)}}%!])\s*(\\text\s*\{{[^{{}}]*\}}(?:\\text\s*\{{[^{{}}]*\}}|[\s/]|\\cdot|{POWER})*)", re.DOTALL
)
WORD_UNIT = re.compile(rf"({NUMBER})(\s*)((?!and\b|or\b)[a-zA-Z]{{2}}[a-zA-Z /.]*(?:{POWER})?)")
LETTER_UNIT = re.compile(rf"({NUMBER})\s*([mglsh](?:{POWER})?)")


def same_number(truth: str, answer: str) -> bool | None:
    """Whether two plain numbers are equal; None where one is no such, or both differ and one is a decimal."""
    if not PLAIN_NUMBER.fullmatch(truth) or not PLAIN_NUMBER.fullmatch(answer):
        return None
    return Fraction(truth) == Fraction(answer) or (None if "." in truth + answer else False)


def same_letter(truth: str, answer: str) -> bool | None:
    """Whether a letter of multiple choice is meant; the answer may go on with the choice's text, `(C) 12`."""
    if LETTERS.fullmatch(plain(truth)) and LETTERS.fullmatch(plain(answer)):
        return set(re.findall(r"\b[A-J]\b", plain(truth))) == set(re.findall(r"\b[A-J]\b", plain(answer)))
    wanted = LETTER.fullmatch(plain(truth)) or LETTER_IN_BRACKETS.match(plain(truth))
    got = LETTER_FIRST.match(plain(answer)) if wanted else None
    if not wanted or not got:
        return None
    return (got[1] or got[2]).upper() == wanted[1]


def same_based_number(truth: str, answer: str) -> bool | None:
    """Whether digits and base are the same, where both name one: 1011_2."""
    said, got = BASED.fullmatch(truth), BASED.fullmatch(answer)
    if not said or not got or not any(map(str.isdigit, said[1])):
        return None
    return said.groups() == got.groups()


def same_words(truth: str, answer: str) -> bool | None:
    """Whether they are the same words, in any order where they are listed; None if the truth is no words."""
    wanted, got, said = _words(truth), _words(answer), plain(truth)
    if not WORD.search(said):
        return None
    if wanted == got:
        return True
    if re.search(r"[\d\\^_=+{}]", said) or not ("\\text" in truth or len(said) > 4):
        return None
    return sorted(re.split(r",? and |, ?| or ", wanted)) == sorted(re.split(r",? and |, ?| or ", got))


def _words(text: str) -> str:
    words = [word for word in plain(text).casefold().split() if word not in FILLERS]
    joined = " ".join(words).strip(" .,;:!\"'")
    return SAME_WORDS.get(joined, joined)


def same_clock_or_ratio(truth: str, answer: str) -> bool | None:
    """Whether two times of the day, or two ratios `a : b`, are the same (am and pm count where both have them)."""
    said, got = plain(truth), plain(answer)
    times = CLOCK.fullmatch(said), CLOCK.fullmatch(got)
    if times[0] and times[1] and (times[0][3] or times[1][3]):
        halves = {half.lower() for half in (times[0][3], times[1][3]) if half}
        return times[0].group(1, 2) == times[1].group(1, 2) and len(halves) == 1
    if not RATIO.fullmatch(said) or not RATIO.fullmatch(got):
        return None
    wanted, parts = ([Fraction(part) for part in text.replace(" ", "").split(":")] for text in (said, got))
    return len(wanted) == len(parts) and all(
        wanted[i] * parts[i + 1] == wanted[i + 1] * parts[i] for i in range(len(parts) - 1)
    )


def split_unit(text: str, other: str) -> tuple[str, str]:
    r"""(value, unit), e.g. `12 \text{ cm}` -> `12`, `cm`; the unit is a known one in its short form, or empty.

    Words in `\text` after a value go, known or not. Bare letters after a number (2ab) go if they are a known unit or a
    word that stands apart; one letter (5 m) only if the `other` answer is a number alone.
    """
    if match := TEXT_UNIT.fullmatch(text):
        return match[1], _unit(match[2])
    if match := WORD_UNIT.fullmatch(text):
        word = match[2] and WORD.search(match[3])
        return (match[1], _unit(match[3])) if word or _unit(match[3]) else (text, "")
    match = LETTER_UNIT.fullmatch(text) if re.fullmatch(NUMBER, other) else None
    return (match[1], _unit(match[2])) if match else (text, "")


def _unit(text: str) -> str:
    """The known unit that the text names first, in its short form, e.g. `square centimeters` -> `cm`."""
    names = [name for name in re.findall("[a-z]+", plain(text).lower()) if name not in ("square", "sq", "cubic")]
    return UNITS.get(names[0], UNITS.get(names[0].removesuffix("s"), "")) if names else ""
