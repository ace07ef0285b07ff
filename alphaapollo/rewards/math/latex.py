r"""Normalization of LaTeX answers: spacing, fonts, synonyms, Unicode signs and calculator notation.

All functions map text to text. They compute no values except repeating decimals; math-verify compares the expressions.
"""

# ruff: noqa: RUF001 the signs are here to be replaced

from __future__ import annotations

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
    "degree": r"^\circ ", "R": r"\mathbb{R}", "lor": r"\text{ or }", "vee": r"\text{ or }",
}  # fmt: skip
COMMAND = re.compile(r"\\([a-zA-Z]+)")
FONT = (
    r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|mbox|hbox|emph|underline|(?:math|bold)(?:rm|bf|it|sf|symbol)|bm|operatorname)"
)
REWRITES = [  # applied in this order
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right|[bB]igg?[lrm]?)(?![a-zA-Z])\.?", ""),
        (r"(?<=\d)(?:\{,\}|,?\\!|\\,)(?=\d{3}(?!\d))", ""),  # between groups of thousands
        (r"(?<!\\)\\[,;:! ]|~", " "),
        (r"\\\\\[\d+[a-z]{2}\]", r"\\\\"),  # space between rows
        (r"\\?\$|[£€¥]|(?<!\\)\\[()\[\]]", " "),  # prices, and delimiters of formulas
        (rf"{FONT}\s*\{{\s*([a-fi-knp-rt-zA-Z]|[-+\d.,/:]+)\s*\}}", r" \1 "),  # one letter, not a unit; a number
        (FONT + r"(?=\s*\{)", r"\\text"),
        (r"\\frac\s*(\\pi|[a-zA-Z\d])\s*(\\pi|[a-zA-Z\d])", r"\\frac{\1}{\2}"),
        (r"(?<![a-zA-Z])\\?sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"(?<![\\a-zA-Z])pi(?![a-zA-Z])", r"\\pi "),
        (r"\\math(?:bin|punct)\{:\}|\{:\}", ":"),
        (r"\+/?-", r"\\pm "),
        (r"\*\*", "^"),
        (r"\\\{\s*\\\}", r"\\emptyset "),
        (r"\\(?:begin|end)\{(?:aligned|split)\}", " "),
        (r"^\s*\\\{\s*\w+(?:\s*\\in\s*\\mathbb\{R\})?\s*(?:\\mid|\||:)(.*)\\\}\s*$", r"\1"),  # {x | x > 2}
        (r"^\s*[A-Z]\s*(?=\([^()]*,[^()]*\)\s*$)", ""),  # the name of a point
        (r"^\s*[a-zA-Z]?\s*\\approx(?![a-zA-Z])", ""),
    )
]
REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?(\d+)\}?")
MIXED = re.compile(r"(-?)\s*(\d+)\s+(\d+)\s*/\s*(\d+)")
SCIENTIFIC = re.compile(r"([-+]?\d+\.?\d*)[eE]([-+]?\d+)")
DEGREES = re.compile(r"\s*\^\s*\{?\s*\\circ\s*\}?\s*(?:[CF]|\\text\s*\{\s*[CF]\s*\})?\s*$")
TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)")
NUMBER_OF_DEGREES = re.compile(r"([\d.]+)\s*\^\s*\{?\s*\\circ\s*\}?")
THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
BRACKET = re.compile(r"[(\[{|]")
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
    if TRIGONOMETRIC.search(text):
        text = NUMBER_OF_DEGREES.sub(r"(\\frac{\1\\pi}{180})", text)
    text = DEGREES.sub("", text)
    if (whole := TEXT.fullmatch(text)) and (re.search(r"\d", whole[1]) or not re.search(r"[a-zA-Z]{2}", whole[1])):
        text = whole[1]
    if mixed := MIXED.fullmatch(text):
        text = rf"{mixed[1]}{mixed[2]}\frac{{{mixed[3]}}}{{{mixed[4]}}}"
    if scientific := SCIENTIFIC.fullmatch(text):
        text = rf"{scientific[1]} \times 10^{{{int(scientific[2])}}}"
    if not BRACKET.search(TEXT.sub("", text)):
        text = THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
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
