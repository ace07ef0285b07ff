r"""One way to write an answer: LaTeX spacing, fonts, synonyms, Unicode signs and calculator style are made the same.

Strings in, strings out, nothing is computed (but repeating decimals), so that what stays different is for algebra.
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
BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10}
FONT = (
    r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|mbox|hbox|emph|underline|(?:math|bold)(?:rm|bf|it|sf|symbol)|bm|operatorname)"
)

# In this order. A command ends where no letter follows.
REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right|[bB]igg?[lrm]?)(?![a-zA-Z])\.?", ""),
        (r"(?<=\d)(?:\{,\}|,?\\!|\\,)(?=\d{3}(?!\d))", ""),  # between groups of thousands
        (r"(?<!\\)\\[,;:! ]|~|\\(?:q?quad|displaystyle|textstyle|limits|hfill)(?![a-zA-Z])", " "),
        (r"\\\\\[\d+[a-z]{2}\]", r"\\\\"),  # space between rows
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\?\$|[£€¥]|(?<!\\)\\[()\[\]]", " "),  # prices, and delimiters of formulas
        (rf"{FONT}\s*\{{\s*([a-fi-knp-rt-zA-Z]|[-+\d.,/:]+)\s*\}}", r" \1 "),  # one letter, not a unit; a number
        (FONT + r"(?=\s*\{)", r"\\text"),
        (r"\\frac\s*\{\s*(\\text\s*\{[^{}]*\})\s*\}\s*\{\s*(\\text\s*\{[^{}]*\})\s*\}", r"\1/\2"),
        (r"^\s*(?:\\[dt]?frac\s*\{d[^{}]*\}\s*\{d[^{}]*\}|[a-zA-Z]'+(?:\([a-z]\))?)\s*=", ""),  # a derivative's name
        (r"\\frac\s*(\\pi|[a-zA-Z\d])\s*(\\pi|[a-zA-Z\d])", r"\\frac{\1}{\2}"),
        (r"\\sqrt\s+([a-zA-Z\d]+)", r"\\sqrt{\1}"),
        (r"(?<![\\a-zA-Z])sqrt\s*(\d+|[a-zA-Z](?![a-zA-Z]))", r"\\sqrt{\1}"),
        (r"(?<![a-zA-Z])\\?sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"(?<![\\a-zA-Z])pi(?![a-zA-Z])", r"\\pi "),
        (r"(?<![\\a-zA-Z])(?:\+\s*)?(?:infinity|infty|inf|oo)(?![a-zA-Z])|\+\s*\\infty", r"\\infty "),
        (r"\\(?:dots|ldots|cdots)(?![a-zA-Z])", "..."),
        (r"\\(?:colon|mathbin\{:\}|mathpunct\{:\})|\{:\}", ":"),
        (r"\\lbrace(?![a-zA-Z])", r"\\{"),
        (r"\\rbrace(?![a-zA-Z])", r"\\}"),
        (r"\\langle(?![a-zA-Z])", "("),
        (r"\\rangle(?![a-zA-Z])", ")"),
        (r"\\[lr]?vert(?![a-zA-Z])", "|"),
        (r"\\(?:leq?|leqslant|leqq)(?![a-zA-Z])|<=", r"\\le "),
        (r"\\(?:geq?|geqslant|geqq)(?![a-zA-Z])|>=", r"\\ge "),
        (r"\\lt(?![a-zA-Z])", "<"),
        (r"\\gt(?![a-zA-Z])", ">"),
        (r"\\neq?(?![a-zA-Z])|!=", r"\\ne "),
        (r"\\varnothing(?![a-zA-Z])|\\\{\s*\\\}", r"\\emptyset "),
        (r"\\(?:R|reals|Reals)(?![a-zA-Z])|\\mathbb\s*R(?![a-zA-Z])", r"\\mathbb{R}"),
        (r"\\(?:degree|deg)(?![a-zA-Z])|(?<=\d)\^\{?o\}?\s*$", r"^\\circ "),
        (r"\+/-|\+-", r"\\pm "),
        (r"\\lor(?![a-zA-Z])|\\vee(?![a-zA-Z])", r"\\text{ or }"),
        (r"\*\*", "^"),
        (r"\\begin\{cases\}(.*?)\\\\(.*?)\\end\{cases\}", r"\1, \2"),
        (r"^\s*\\\{\s*\w+(?:\s*\\in\s*\\mathbb\{R\})?\s*(?:\\mid|\||:)(.*)\\\}\s*$", r"\1"),  # {x | x > 2}
        (r"(?<=[\])])\s*U\s*(?=[(\[])", r" \\cup "),
        (r"\\log_\s*\{?e\}?", r"\\ln "),
        (r"\\(?:begin|end)\{(?:align|aligned|gathered|split)\*?\}", " "),
        (r"(?<=\w)\s*,?\s*\\text\s*\{\s*(?:for|where|is|with)\b[^{}]*\}[^&]*$", ""),  # what is said about it
        (r"^\s*[fgh]\s*\(\s*x\s*\)\s*=", "y="),
        (r"^\s*[a-zA-Z]\s*(?:\\approx|\\simeq)(?![a-zA-Z])", ""),
        (r"^\s*[A-Z]\s*(?=\([^()]*,[^()]*\)\s*$)", ""),  # the name of a point
        (r"(?<=.)\s*(?:\\approx|\\simeq)(?![a-zA-Z]).*", ""),  # what it is about comes second
        (r"^\s*(?:\\approx|\\simeq)(?![a-zA-Z])", ""),
    )
]
REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?(\d+)\}?")
AND_SO_ON = re.compile(r"(\d*)\.(\d*?)(\d+?)\3{2,}\s*\.\.\.")  # 0.1666...
MIXED = re.compile(r"(-?)\s*(\d+)\s+(\d+)\s*/\s*(\d+)")
SCIENTIFIC = re.compile(r"([-+]?\d+\.?\d*)[eE]([-+]?\d+)")
BASE_WORD = re.compile(r"_\s*\{?\s*\\text\s*\{\s*(\w+)\s*\}\s*\}?")
ORDINAL = re.compile(r"(\d)\s*\^?\s*\{?\s*(?:\\text\s*\{)?\s*(?:st|nd|rd|th)\s*\}*$")
DEGREES = re.compile(r"\s*\^\s*\{?\s*\\circ\s*\}?\s*(?:[CF]|\\text\s*\{\s*[CF]\s*\})?\s*$")
NUMBER_OF_DEGREES = re.compile(r"([\d.]+)\s*\^\s*\{?\s*\\circ\s*\}?")
THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
BRACKET = re.compile(r"[(\[{|]")
TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
PREAMBLE = re.compile(r"^.*\b(?:(?:is|are|equals)\b|answer\s*:):?", re.DOTALL | re.IGNORECASE)


def tidy(answer: str) -> str:
    r"""The answer in one way of writing, e.g. `$\dfrac12$ ` -> `\frac{1}{2}`, `1{,}234` -> `1234`, `3\,\mathrm{cm}` ->
    `3 \text{cm}`. Words and units stay."""
    text = unicodedata.normalize("NFKC", answer.translate(SIGNS))
    for pattern, replacement in REWRITES:
        text = pattern.sub(replacement, text)
    text = AND_SO_ON.sub(_as_fraction, REPEATING.sub(_as_fraction, text))
    text = BASE_WORD.sub(lambda match: f"_{{{BASES.get(match[1], match[1])}}}", text)
    text = _without_preamble(text)
    text = ORDINAL.sub(r"\1", _strip(text))
    if re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", text):
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
    return _strip(text)


def squeeze(text: str) -> str:
    """Without white space, and without braces around one character: for a comparison sign by sign."""
    return re.sub(r"\{(\w)\}", r"\1", re.sub(r"\s", "", text))


def plain(text: str) -> str:
    r"""The words: without `\text{}` and surrounding white space."""
    return " ".join(TEXT.sub(r" \1 ", text).split())


def _strip(text: str) -> str:
    return text.strip().rstrip(" .,;\\\n\t")


def _without_preamble(text: str) -> str:
    """Without "the answer is"."""
    rest = PREAMBLE.sub("", text)
    if rest.count("}") == rest.count("{") + 1:  # it stood inside braces
        rest = rest.replace("}", " ", 1)
    return rest if rest.strip() and rest.count("{") == rest.count("}") else text


def _as_fraction(match: re.Match[str]) -> str:
    """0.1(6) = (16 - 1) / 90."""
    whole, fixed, repeated = match.groups()
    scale = 10 ** len(fixed)
    value = Fraction(int(whole + fixed + repeated or 0) - int(whole + fixed or 0), scale * (10 ** len(repeated) - 1))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
