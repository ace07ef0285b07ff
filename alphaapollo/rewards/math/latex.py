r"""Answers as LaTeX texts: normalization (spacing, fonts, synonyms, Unicode signs, calculator notation), and comparison
without algebra (choice letters, words, units, clock times, and numbers with a base such as 1011_2).

Each `compare_*` function takes the ground truth and the answer as normalized LaTeX (see `normalize_latex`). It returns
whether the two are equal, or None if the comparison does not apply, e.g. if they are not clock times.
"""

# ruff: noqa: RUF001 the signs are here to be replaced

from __future__ import annotations

import math
import re
import unicodedata
from fractions import Fraction

SIGNS = str.maketrans(
    {
        "−": "-", "–": "-", "—": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "∕": "/", "⁄": "/",
        "π": r"\pi ", "θ": r"\theta ", "√": r"\sqrt ", "∞": r"\infty ", "±": r"\pm ", "≠": r"\ne ", "°": r"^\circ ",
        "≤": r"\le ", "≥": r"\ge ", "⩽": r"\le ", "⩾": r"\ge ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ",
        "∅": r"\emptyset ", "≈": r"\approx ", "ℝ": r"\mathbb{R}", "²": "^2", "³": "^3", "½": r"\frac{1}{2}",
        "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}",
    }
)  # fmt: skip
SYNONYMS = {
    "lbrace": r"\{", "rbrace": r"\}", "langle": "(", "rangle": ")", "colon": ":", "varnothing": r"\emptyset ",
    "degree": r"^\circ ", "R": r"\mathbb{R}",
}  # fmt: skip
COMMAND = re.compile(r"\\([a-zA-Z]+)")
FONT = (
    r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|mbox|hbox|emph|underline|(?:math|bold)(?:rm|bf|it|sf|symbol)|bm|operatorname)"
)
REWRITES = [  # applied in this order
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?<=\d)(?:(?:\\text)?\{,\}|,?\\!|\\,|\\thinspace)\s*(?=\d{3}(?!\d))", ""),  # between groups of thousands
        (r"(?<=\d),(?:\\[,;: ]|\\q?quad)\s*(?=\d{3}(?!\d))", "{,}"),  # thousands or a list, see join_thousands
        (r"(?<!\\)\\[,;:! ]|~", " "),
        (r"\\?\$|[£€¥]|(?<!\\)\\[()\[\]]", " "),  # prices, and delimiters of formulas
        (rf"{FONT}\s*\{{\s*([a-fi-knp-rt-zA-Z]|[-+\d.,/:]+)\s*\}}", r" \1 "),  # one letter, not a unit; a number
        (FONT + r"(?=\s*\{)", r"\\text"),
        (r"\\text\s*\{\s*(?:percent|per cent|pct)\s*\}|\b(?:percent|per cent|pct)\b", r"\\%"),
        (r"\\frac\s*(\\pi|[a-zA-Z\d])\s*(\\pi|[a-zA-Z\d])", r"\\frac{\1}{\2}"),
        (r"(?<![\\a-zA-Z])pi(?![a-zA-Z])", r"\\pi "),
        (r"\\math(?:bin|punct)\{:\}|\{:\}", ":"),
    )
]
REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?(\d+)\}?")
MIXED = re.compile(r"(-?)\s*(\d+)\s+(\d+)\s*/\s*(\d+)")
SCIENTIFIC = re.compile(r"([-+]?\d+\.?\d*)[eE]([-+]?\d+)")
DEGREES = re.compile(r"\s*\^\s*\{?\s*\\circ\s*\}?\s*(?:[CF]|\\text\s*\{\s*[CF]\s*\})?\s*$")
TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
PREAMBLE = re.compile(r"^.*\b(?:(?:is|are|equals)\b|answer\s*:):?", re.DOTALL | re.IGNORECASE)


def normalize_latex(answer: str) -> str:
    r"""Rewrite an answer in one notation, e.g. `$\dfrac12$ ` as `\frac{1}{2}`, `1{,}234` as `1234`, and
    `3\,\mathrm{cm}` as `3 \text{cm}`. Words and units are not changed."""
    text = unicodedata.normalize("NFKC", answer.translate(SIGNS))
    text = COMMAND.sub(lambda match: SYNONYMS.get(match[1], match[0]), text)
    for pattern, replacement in REWRITES:
        text = pattern.sub(replacement, text)
    text = _strip_punctuation(_remove_preamble(REPEATING.sub(_convert_repeating_decimal, text)))
    text = DEGREES.sub("", text)
    if (whole := TEXT.fullmatch(text)) and (re.search(r"\d", whole[1]) or not re.search(r"[a-zA-Z]{2}", whole[1])):
        text = whole[1]
    if mixed := MIXED.fullmatch(text):
        text = rf"{mixed[1]}{mixed[2]}\frac{{{mixed[3]}}}{{{mixed[4]}}}"
    if scientific := SCIENTIFIC.fullmatch(text):
        text = rf"{scientific[1]} \times 10^{{{int(scientific[2])}}}"
    return _strip_punctuation(text)


def remove_spacing(text: str) -> str:
    """Return a LaTeX text without white space and without braces around single characters."""
    return re.sub(r"\{(\w)\}", r"\1", re.sub(r"\s", "", text))


def extract_words(text: str) -> str:
    r"""Replace each `\text{...}` by its content, and white space by single spaces."""
    return " ".join(TEXT.sub(r" \1 ", text).split())


def _strip_punctuation(text: str) -> str:
    return text.strip().rstrip(" .,;\\\n\t")


def _remove_preamble(text: str) -> str:
    """Remove a leading phrase such as "the answer is"."""
    rest = PREAMBLE.sub("", text)
    if rest.count("}") == rest.count("{") + 1:  # the preamble opened a brace
        rest = rest.replace("}", " ", 1)
    return rest if rest.strip() and rest.count("{") == rest.count("}") else text


def _convert_repeating_decimal(match: re.Match[str]) -> str:
    """Convert a match of REPEATING, a repeating decimal, to a LaTeX fraction: 0.1(6) = (16 - 1) / 90."""
    whole, fixed, repeated = match.groups()
    scale = 10 ** len(fixed)
    value = Fraction(int(whole + fixed + repeated or 0) - int(whole + fixed or 0), scale * (10 ** len(repeated) - 1))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


LETTER = re.compile(r"\(?\s*([A-J])\s*\)?\.?")
LETTER_IN_BRACKETS = re.compile(r"\(\s*([A-J])\s*\)\s")  # followed by the text of the choice
LETTER_FIRST = re.compile(r"(?:option|choice)?\s*(?:\(\s*([A-J])\s*\)|([A-J])(?=\s*[.):]|$))", re.IGNORECASE)
BASED = re.compile(r"(\w+)\s*_\s*\{?(\d+)\}?")
CLOCK = re.compile(r"([01]?\d|2[0-4]):([0-5]\d)\s*(?:([ap])\.?\s*m\.?)?", re.IGNORECASE)
LIST_COMMA = re.compile(r",(?!\d{3}(?!\d))")
WORD = re.compile(r"[^\W\d_]{3,}")
SYNONYMOUS_WORDS = {
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


def compare_choice_letters(truth: str, answer: str) -> bool | None:
    """Return whether two choice letters are equal, or None for other answers. Text may follow the letter: `(C) 12`."""
    text = extract_words(truth)
    expected = LETTER.fullmatch(text) or LETTER_IN_BRACKETS.match(text)
    chosen = LETTER_FIRST.match(extract_words(answer)) if expected else None
    if not expected or not chosen:
        return None
    return (chosen[1] or chosen[2]).upper() == expected[1]


def compare_numbers_in_base_notation(truth: str, answer: str) -> bool | None:
    """Return whether two numbers such as 1011_2 have the same digits and base, or None for other answers."""
    expected, answered = BASED.fullmatch(truth), BASED.fullmatch(answer)
    if not expected or not answered or not any(map(str.isdigit, expected[1])):
        return None
    return expected.groups() == answered.groups()


def compare_clock_times(truth: str, answer: str) -> bool | None:
    """Return whether two times of day are equal; None if one is not a time of day, or both may be ratios. The truth
    12:00 or 3:45 is no ratio, because it is not in lowest terms."""
    expected, answered = CLOCK.fullmatch(extract_words(truth)), CLOCK.fullmatch(extract_words(answer))
    if not expected or not answered:
        return None
    times = [(int(clock[1]), int(clock[2])) for clock in (expected, answered)]
    halves = {half.lower() for half in (expected[3], answered[3]) if half}  # a: a.m., p: p.m.
    if not halves and expected[2][0] != "0" and math.gcd(*times[0]) == 1:
        return None
    return times[0] == times[1] and len(halves) <= 1


def join_thousands(text: str, compared_answer: str) -> str:
    r"""Rewrite `32,\; 349`, normalized to `32{,}349`, as a list if the compared answer is a list, else as a number."""
    has_list_comma = LIST_COMMA.search(compared_answer.replace("{,}", ""))
    return text.replace("{,}", ", " if has_list_comma else "")


def compare_words(truth: str, answer: str) -> bool | None:
    """Return whether two answers have the same words (lists in any order), or None if the ground truth has no words."""
    expected, answered, text = _normalize_words(truth), _normalize_words(answer), extract_words(truth)
    if not WORD.search(text):
        return None
    if expected == answered:
        return True
    if re.search(r"[\d\\^_=+{}]", text) or not ("\\text" in truth or len(text) > 4):
        return None
    return sorted(re.split(r",? and |, ?| or ", expected)) == sorted(re.split(r",? and |, ?| or ", answered))


def _normalize_words(text: str) -> str:
    """Return the words of an answer in lower case, with one word for synonyms, e.g. `none` for `DNE`."""
    words = extract_words(text).casefold().strip(" .,;:!\"'")
    return SYNONYMOUS_WORDS.get(words, words)


def split_unit(text: str, compared_answer: str) -> tuple[str, str]:
    r"""Split an answer into (value, known unit or ""), e.g. `12 \text{ cm}` into `12`, `cm`. Unknown units are dropped.

    Words in `\text` after a value always count as a unit. Letters after a number count if they are a known unit (2cm)
    or a separate word (2 dogs); a single letter (5 m) counts only if `compared_answer` is a number without letters.
    """
    if match := TEXT_UNIT.fullmatch(text):
        return match[1], _find_unit(match[2])
    if match := WORD_UNIT.fullmatch(text):
        is_separate_word = match[2] and WORD.search(match[3])
        return (match[1], _find_unit(match[3])) if is_separate_word or _find_unit(match[3]) else (text, "")
    match = LETTER_UNIT.fullmatch(text) if re.fullmatch(NUMBER, compared_answer) else None
    return (match[1], _find_unit(match[2])) if match else (text, "")


def _find_unit(text: str) -> str:
    """Return the short form of a unit, dropping `square` and `cubic`: cm for square centimeters; empty if unknown."""
    names = [
        name for name in re.findall("[a-z]+", extract_words(text).lower()) if name not in ("square", "sq", "cubic")
    ]
    return UNITS.get(names[0], UNITS.get(names[0].removesuffix("s"), "")) if names else ""
