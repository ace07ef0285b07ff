r"""Mathematical answers: compared as written, else by math-verify (symbolic equality of LaTeX and plain expressions).

    marked answer -> tidy -> as it stands? letter, words, clock? unit? brackets? -> math-verify

math-verify's own time-outs are signal alarms, which fail outside a main thread and miss C code: they are off here, and
the process is killed instead (rewards.grader_processes.pool). Imported only in that process: it brings sympy along.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import re
from typing import Any

import sympy
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from alphaapollo.rewards.answer_extraction import find_answer_tag, find_boxed, find_marked_answer
from alphaapollo.rewards.math.latex import SIGNS, plain, squeeze, tidy
from alphaapollo.rewards.math.plain_answers import (
    LETTER,
    WORD,
    same_based_number,
    same_clock_or_ratio,
    same_letter,
    same_number,
    same_words,
    split_unit,
)
from alphaapollo.types import Outcome, Prompt, Score

MAX_LENGTH = 1000  # characters of an answer, beyond those of the ground truth; parsers take ever longer
MAX_DEPTH = 40  # brackets in brackets; parsers need ever longer for more
TAIL = 2000  # characters of a text that marks no answer in which one is looked for
ROUNDING, PRECISION = 1e-5, 1e-12  # relative error of a number that was written as a decimal, and of any other
DIGITS = 30  # that are computed
STATED = re.compile(
    r"(?:answer|option|choice)(?: is|:)[\s:*]*([^\n]*?)\**\s*(?:\.\s*\*{0,2}(?=\s|$)|\n|$)", re.IGNORECASE
)
BOLD = re.compile(r"\*\*([^*\n]+)\*\*")
NATURAL_LOG = re.compile(r"\\log(?![a-zA-Z])(?!\s*_)")  # log is ln to whoever writes no ln
FEW_WORDS = re.compile(r"[a-zA-Z]+(?: [a-zA-Z]+)?")
LAST_WORDS = re.compile(
    r"(?: is| are| equals|=)\s+((?:(?![a-zA-Z]{2}|[$=\\\n]).){1,40}?)\.?\s*$"
)  # `is 2√3.`, without words
NO_WORD = r"((?:(?![a-zA-Z]{2}|[=<>≤≥\n:;]|\.\s).){1,40}?)"
ALTERNATIVES = re.compile(
    rf"(?:^|[a-zA-Z]{{2}}\s|=){NO_WORD}(?:\s[a-zA-Z]+)?,?\s+or\s+(?:[a-zA-Z]\s*=\s*)?{NO_WORD}(?:\s[a-zA-Z]+){{0,3}}\.?\s*$",
    re.MULTILINE,
)  # `is 5 or 6.`, `5 cm or 6 cm`
BETWEEN_BOXES = r"(?:[\s,$}]|\\text\{|\band\b|\bor\b|\b[a-z]\s*=)*"
SEVERAL_BOXES = re.compile(rf"\\boxed\{{[^{{}}]*\}}(?:{BETWEEN_BOXES}\\boxed\{{[^{{}}]*\}})+")
BOX = re.compile(r"\\boxed\{([^{}]*)\}")
PERCENT = re.compile(r"\s*(?:\\?%|\\text\s*\{\s*(?:percent|per cent)\s*\}|percent)")
MODULUS = re.compile(
    r"^\s*[a-zA-Z]\s*\\equiv|\\pmod\s*(?:\{\w+\}|\w)|\(?\s*(?:\\text\s*\{\s*\(?\s*mod\s*\}|\\b?mod)\s*\w+\s*\)?"
)
DESCENDING = re.compile(r"[^<]*(?:>|\\ge )[^<]*")
RELATION = re.compile(r"(<|>|\\le |\\ge )")
FLIPPED = {">": "<", "\\ge ": "\\le "}
UNEQUAL = re.compile(r"^\s*[a-zA-Z]\s*\\ne(?![a-zA-Z])")
OR = re.compile(r"\\text\s*\{\s*,?\s*or\s*\}|\bor\b")
LIST_COMMA = re.compile(r",|\\text\s*\{\s*,?\s*and\s*\}|\band\b")
NAMED_VALUE = re.compile(r"([a-zA-Z])\s*=\s*([^=<>,]+)")
COLUMN = re.compile(r"\\begin\{[pb]matrix\}([^&]*)\\end\{[pb]matrix\}", re.DOTALL)
ENCLOSED = re.compile(r"[()\[\]{}=]")
TEX_BRACES = re.compile(r"(?<!\\)[{}]")
NO_UNITS = LatexExtractionConfig(
    boxed_match_priority=0,
    normalization_config=dataclasses.replace(LatexExtractionConfig().normalization_config, units=False),
)

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time-outs are off


def grade(prompt: Prompt, completion: str) -> Score:
    """1 if the answers are mathematically equal, else 0; wrong format where no expression can be read.

    Raises:
        ValueError: the ground truth is empty. Whatever sympy raises, if nothing could be compared.
    """
    truth = prompt.ground_truth
    if truth is None or not (wanted := tidy(final_answer(truth) or truth)):
        raise ValueError(f"the ground truth {truth!r} is not a mathematical expression")
    answer = final_answer(completion, in_words=bool(WORD.search(plain(wanted))))
    if answer is None:
        answer = _last_words(completion[-TAIL:])
    if answer is not None and len(answer) > len(truth) + MAX_LENGTH:
        return _unreadable(f"an answer of {len(answer)} characters")
    if answer is not None and depth(answer) > max(MAX_DEPTH, depth(truth)):
        return _unreadable(f"an answer of {depth(answer)} brackets in each other")
    if answer is None:
        right = equal(_read_all(wanted), readings) if (readings := read(completion[-TAIL:].translate(SIGNS))) else None
    else:
        right = same(wanted, tidy(answer)) if answer.strip() else None
    if right is None:
        return _unreadable("no mathematical expression in the answer")
    return Score(float(right), {"accuracy": float(right)})


def depth(text: str) -> int:
    """The most brackets that are open at a time."""
    steps = (1 if sign in "([{" else -1 for sign in text if sign in "()[]{}")
    return max(itertools.accumulate(steps), default=0)


def _unreadable(reason: str) -> Score:
    return Score(0.0, {"accuracy": 0.0}, Outcome.WRONG_FORMAT, reason)


def final_answer(text: str, in_words: bool = False) -> str | None:
    r"""The answer that the text marks, else what follows its last "answer is" or "answer:": an expression, a
    letter, or one or two words if it is wanted `in_words`.

    Boxes that stand side by side at the end, `\boxed{2} and \boxed{3}`, are one answer.
    """
    boxed_part = find_answer_tag(text) or text
    rows = list(SEVERAL_BOXES.finditer(boxed_part))
    if rows and find_boxed(boxed_part) == (boxes := BOX.findall(rows[-1][0]))[-1].strip():
        return ", ".join(dict.fromkeys(box.strip() for box in boxes))
    marked = find_marked_answer(text)
    if marked is not None:
        return marked
    text = BOLD.sub(r"\1", text[-TAIL:])
    stated = [match[1] for match in STATED.finditer(text)]
    for said in reversed(stated):
        if read(said) or LETTER.fullmatch(plain(tidy(said))) or (in_words and FEW_WORDS.fullmatch(plain(tidy(said)))):
            return said
    return None


def _last_words(text: str) -> str | None:
    """The expression with which the text ends: 2√3 of "The length is 2√3.", and "5, 6" of "It is 5 or 6."."""
    text = BOLD.sub(r"\1", text)
    if (several := ALTERNATIVES.search(text.strip().rpartition("\n")[2])) and all(
        read(f"\\boxed{{{tidy(one)}}}") for one in several.groups()
    ):
        return ", ".join(one.strip() for one in several.groups())
    ends = LAST_WORDS.search(text)
    return ends[1] if ends and read(f"\\boxed{{{tidy(ends[1])}}}") else None


def same(truth: str, answer: str) -> bool:
    """Whether two tidy answers are equal."""
    if squeeze(truth) == squeeze(answer):
        return True
    for judge in (same_number, same_letter, same_based_number, same_clock_or_ratio, same_words):
        if (verdict := judge(truth, answer)) is not None:
            return verdict
    if ("\\ln" in truth) != ("\\ln" in answer):
        truth, answer = (NATURAL_LOG.sub(r"\\ln", text) for text in (truth, answer))
    truth, unit = split_unit(truth, answer)
    answer, other_unit = split_unit(answer, truth)
    if unit and other_unit and unit != other_unit:
        return False
    if (_is_set(truth) and _is_tuple(answer)) or (_is_tuple(truth) and _is_set(answer)):
        return False
    if bool(MODULUS.search(truth)) != bool(MODULUS.search(answer)):
        truth, answer = (MODULUS.sub("", text) for text in (truth, answer))
    if (pairs := _paired(truth, answer)) is not None:
        return all(same(one, other) for one, other in pairs)
    if "\\pm" in truth + answer:
        truth, answer = (_both_signs(text) for text in (truth, answer))
    if bool(PERCENT.search(truth)) == bool(PERCENT.search(answer)):
        return equal(_read_all(PERCENT.sub("", truth)), _read_all(PERCENT.sub("", answer)))
    golds, answers = (_percentages(text) for text in (truth, answer))
    return any(equal(_read_all(gold), _read_all(text)) for gold in golds for text in answers)


def _paired(truth: str, answer: str) -> list[tuple[str, str]] | None:
    """What belongs together in two lists of named values (x = 1, y = 2), or in one and a tuple, or in a tuple and a
    column; None for others, and where they have not the same length or names."""
    named = _named_values(truth), _named_values(answer)
    if named[0] and named[1] and named[0].keys() == named[1].keys():
        return [(value, named[1][name]) for name, value in named[0].items()]
    entries = [
        list(names.values()) if names else _entries(text) for names, text in zip(named, (truth, answer), strict=True)
    ]
    mixed = any(named) or sum("\\begin" in text for text in (truth, answer)) == 1
    if not mixed or len(entries[0]) != len(entries[1]) or len(entries[0]) < 2:
        return None
    return list(zip(*entries, strict=True))


def _named_values(text: str) -> dict[str, str]:
    """`a = 1, b = 2` by name; empty for anything else, and for several values of one name (x_1 = 1, x_2 = 2)."""
    parts = [NAMED_VALUE.fullmatch(part.strip()) for part in LIST_COMMA.split(text)]
    values = {part[1]: part[2] for part in parts if part}
    return values if len(values) == len(parts) > 1 else {}


def _entries(text: str) -> list[str]:
    """The entries of a tuple, a bare list or a column of numbers; empty for anything else."""
    if column := COLUMN.fullmatch(text):
        return [part for part in column[1].split("\\\\") if part.strip()]
    inner = text[1:-1] if _is_tuple(text) else text
    return [] if "\\begin" in inner or ENCLOSED.search(TEX_BRACES.sub("", inner)) else inner.split(",")


def _both_signs(text: str) -> str:
    """`1 \\pm x` as `1 + x, 1 - x`; a list stays as it is."""
    return text if "\\pm" not in text or "," in text else ", ".join(text.replace("\\pm", sign) for sign in "+-")


def _percentages(text: str) -> list[str]:
    """What 36% may be taken for, beside an answer without that sign: 36, and 36/100."""
    bare = PERCENT.sub("", text)
    return [text] if bare == text else [bare, f"\\frac{{{bare}}}{{100}}"]


def read(text: str) -> list[Any]:
    """The final expression in a text: sympy objects and, as a fallback, its string. Empty: none."""
    return list(parse(text, [NO_UNITS, ExprExtractionConfig()], parsing_timeout=None))


def _read_all(answer: str) -> list[Any]:
    """The readings of a tidy answer: inequalities ascending, `a or b` of them as a union, x != a, b as a set."""
    if UNEQUAL.match(answer):
        values = [read(f"\\boxed{{{UNEQUAL.sub('', part)}}}") for part in LIST_COMMA.split(answer)]
        return [sympy.Complement(sympy.S.Reals, sympy.FiniteSet(*(value[0] for value in values if value)))]
    parts = [_ascending(part) for part in OR.split(answer)]
    if len(parts) > 1 and all(RELATION.search(part) for part in parts):
        relations = [reading for part in parts for reading in read(f"\\boxed{{{part}}}")[:1]]
        if len(relations) == len(parts) and all(isinstance(one, sympy.logic.boolalg.Boolean) for one in relations):
            return [sympy.Union(*(relation.as_set() for relation in relations))]
    readings = read(f"\\boxed{{{parts[0] if len(parts) == 1 else answer}}}") or read(answer)
    return [_solved(_exact(_with_imaginary(reading))) for reading in readings]


def _solved(expression: Any) -> Any:
    """The numbers that satisfy |x| < 1, or -1 < x < 1, as a set; anything else as it is."""
    names = expression.free_symbols if isinstance(expression, sympy.logic.boolalg.Boolean) else ()
    if len(names) != 1 or not expression.has(sympy.Abs):
        return expression
    return expression.subs({name: sympy.Symbol(name.name, real=True) for name in names}).as_set()


def _ascending(text: str) -> str:
    """`3 > x > 1` as `1 < x < 3`."""
    if not RELATION.search(text) or not DESCENDING.fullmatch(text) or "\\le " in text:
        return text
    return "".join(FLIPPED.get(part, part) for part in reversed(RELATION.split(text)))


def _with_imaginary(expression: Any) -> Any:
    """The letter i as the imaginary unit, unless it counts something."""
    if not isinstance(expression, sympy.Basic) or expression.has(sympy.Sum, sympy.Product):
        return expression
    if isinstance(expression, sympy.Eq):  # which would evaluate itself
        return sympy.Eq(*map(_with_imaginary, expression.args), evaluate=False)
    return expression.subs({symbol: sympy.I for symbol in expression.free_symbols if symbol.name == "i"})


def _exact(expression: Any) -> Any:
    """0.5 as 1/2 in formulas; numbers alone stay decimals, which may be rounded."""
    if not isinstance(expression, sympy.Expr) or isinstance(expression, sympy.Float):
        return expression
    return expression.xreplace({number: sympy.Rational(str(number)) for number in expression.atoms(sympy.Float)})


def _is_set(text: str) -> bool:
    return text.startswith("\\{") and text.endswith("\\}") and "," in text


def _is_tuple(text: str) -> bool:
    return text.startswith("(") and text.endswith(")") and text.count("(") == 1 and "," in text


def equal(gold: list[Any], answer: list[Any]) -> bool:
    """Whether any reading of the answer equals any of the ground truth; raises what sympy raises, if none does."""
    errors: list[Exception] = []
    for one in gold:
        for other in answer:
            try:
                if _close(one, other) and verify(
                    [one], [other], allow_set_relation_comp=True, timeout_seconds=None, raise_on_error=True
                ):
                    return True
            except Exception as error:  # noqa: BLE001 whatever sympy raises on what a model wrote
                errors.append(error)
    if errors:
        raise errors[0]
    return False


def _close(gold: Any, answer: Any) -> bool:
    """False for two numbers that differ by more than rounding, which math-verify takes for equal if they are tiny (it
    rounds to six places) or huge (sympy chops them)."""
    if not all(isinstance(one, sympy.Expr) and one.is_number for one in (gold, answer)):
        return True
    size, error = abs(gold.evalf(DIGITS)), abs(gold.evalf(DIGITS) - answer.evalf(DIGITS))
    if not size.is_finite or not error.is_finite:
        return True
    rounded = gold.has(sympy.Float) or answer.has(sympy.Float)
    return bool(error <= (ROUNDING if rounded else PRECISION) * (size or 1))
