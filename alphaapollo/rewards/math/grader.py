r"""Grader of mathematical answers: compare as text where possible, else by math-verify (symbolic equality).

    final answer -> normalize -> compare text, letters, words, clock times, units, brackets -> math-verify

math-verify's timeouts are disabled: they are signal alarms, which need a main thread and cannot interrupt C code. The
grader process is killed instead (processes/host.py). Only that process imports this module, because importing
sympy is slow."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import re
from typing import Any

import sympy
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from alphaapollo.rewards.answers import find_marked_answer, find_marked_answers, read_accepted_answers
from alphaapollo.rewards.base import make_accuracy_score, make_wrong_format_score
from alphaapollo.rewards.math.latex import (
    LETTER,
    NUMBER,
    SIGNS,
    compare_choice_letters,
    compare_clock_times,
    compare_numbers_in_base_notation,
    compare_words,
    extract_words,
    join_thousands,
    normalize_latex,
    remove_spacing,
    split_unit,
)
from alphaapollo.types import Prompt, Score

MAX_LENGTH = 1000  # an answer may have this many more characters than the ground truth; parsing time grows with length
MAX_DEPTH = 40  # nested brackets; parsing time grows with depth
TAIL_LENGTH = 2000  # without a marked answer, only this many characters at the end are searched
ROUNDING, PRECISION = 1e-5, 1e-12  # allowed relative error of decimals, and of other numbers
NUM_DIGITS = 30  # precision of numerical comparisons
STATED = re.compile(
    r"(?:answer|option|choice)(?: is|:)[\s:*]*([^\n]*?)\**\s*(?:\.\s*\*{0,2}(?=\s|$)|\n|$)", re.IGNORECASE
)
BOLD = re.compile(r"\*\*([^*\n]+)\*\*")
LAST_QUANTITY = re.compile(
    r"(?:^|(?<=[\s(])(?<!and )(?<!or )(?<!, ))"
    rf"(?:\$([^$\n]+)\$|({NUMBER})(?=\s*[%\\a-z]))\s*(\\?%|[a-z]+(?: [a-z]+)?|)\.?$"
)  # `$\frac{1}{3}$ meters`, `by 28 percent`
NO_WORD = r"((?:(?![a-zA-Z]{2}|[=<>≤≥\n:;]|\.\s).){1,40}?)"  # an expression without words
ALTERNATIVES = re.compile(
    rf"(?:^|[a-zA-Z]{{2}}\s|=){NO_WORD}(?:\s[a-zA-Z]+)?,?\s+or\s+(?:[a-zA-Z]\s*=\s*)?{NO_WORD}(?:\s[a-zA-Z]+){{0,3}}\.?\s*$",
    re.MULTILINE,
)  # `is 5 or 6.`, `5 cm or 6 cm`
PERCENT = re.compile(r"\s*\\?%")
COMMA = re.compile(r",|\\text\s*\{\s*,?\s*and\s*\}|\band\b")
NAMED_VALUE = re.compile(r"([a-zA-Z])\s*=\s*([^=<>,]+)")
NUMBER_FIRST = re.compile(  # `5 = 6`, `x = 5 \to 6`: math-verify reads the last part only
    r"(?:[a-zA-Z]\s*=)?\s*(\(?\s*[-+]?\s*(?:\d[\d.]*|\.\d+)\s*\)?|[-+]?\s*\\frac\s*\{\d+\}\s*\{\d+\})\s*"
    r"(?:[^\w\s+*/^%!|.,:;<>()\[\]{}'\"$\\-]|->|[^\x00-\x7f]|\\(?:[a-zA-Z]*arrow|(?:long)?mapsto|to|implies|iff|n?mid"
    r"|n?parallel|perp|n?sim|cong|equiv|asymp|propto|doteq|in|ni|land|wedge|cup|cap|[cv]?dots|gg|ll|star|ast|circ|bullet"
    r"|backslash|not|stackrel|overset|underset|[hv]space|hskip|because|therefore|vdash|models|prec|succ|oplus|otimes)(?![a-zA-Z]))"
)
EXTRACTION_WITHOUT_UNITS = LatexExtractionConfig(
    boxed_match_priority=0,
    normalization_config=dataclasses.replace(LatexExtractionConfig().normalization_config, units=False),
)

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off


def grade_math(prompt: Prompt, completion: str) -> Score:
    """Return a score of 1 if the answer equals an accepted answer, else 0. Raises sympy's errors."""
    scores = [_compare_with_truth(truth, completion) for truth in _read_accepted_answers(prompt.ground_truth)]
    return max(scores, key=lambda score: score.reward)


def answer_math(prompt: Prompt) -> str:
    """Return an answer that `grade_math` must score 1. Raises ValueError for an unreadable ground truth."""
    truth = _read_accepted_answers(prompt.ground_truth)[0]
    return f"\\boxed{{{find_final_answer(truth) or truth}}}"


def _read_accepted_answers(truth: object) -> list[str]:
    accepted = [text for text in read_accepted_answers(truth) if normalize_latex(find_final_answer(text) or text)]
    if not accepted:
        raise ValueError(f"the ground truth {truth!r:.200} is not a mathematical expression")
    return accepted


def _compare_with_truth(truth: str, completion: str) -> Score:
    """Grade a completion against one accepted answer (see `grade_math`)."""
    expected = normalize_latex(find_final_answer(truth) or truth)
    answer = find_final_answer(completion)
    if answer is None:
        answer = _find_last_expression(completion[-TAIL_LENGTH:])
    if answer is None:
        readings = parse_expressions(completion[-TAIL_LENGTH:].translate(SIGNS))
        is_equal = has_equal_expression(_parse_answer(expected), readings) if readings else None
    elif len(answer) > len(truth) + MAX_LENGTH:
        return make_wrong_format_score(f"the answer is too long ({len(answer)} characters)")
    elif measure_bracket_depth(answer) > max(MAX_DEPTH, measure_bracket_depth(truth)):
        return make_wrong_format_score(f"the brackets are nested too deeply ({measure_bracket_depth(answer)} levels)")
    else:
        is_equal = _is_right(expected, answer) if answer.strip() else None
        if is_equal is False and len(parts := {*find_marked_answers(completion)}) > 1:  # one answer in several forms
            is_equal = all(_is_right(expected, part) for part in parts)
    return make_wrong_format_score("no expression in the answer") if is_equal is None else make_accuracy_score(is_equal)


def measure_bracket_depth(text: str) -> int:
    """Return the maximum nesting depth of brackets."""
    steps = (1 if sign in "([{" else -1 for sign in text if sign in "()[]{}")
    return max(itertools.accumulate(steps), default=0)


def find_final_answer(text: str) -> str | None:
    r"""Return the marked answer (`<answer>`, `\boxed`, `####`), else what follows the last "answer is" or "answer:".

    An unmarked answer must be an expression or a letter. Adjacent boxes, `\boxed{2} and \boxed{3}`, are one answer.
    Returns None if there is no answer."""
    marked = find_marked_answer(text)
    if marked is not None:
        return marked
    for stated in reversed(STATED.findall(BOLD.sub(r"\1", text[-TAIL_LENGTH:]))):
        words = extract_words(normalize_latex(stated))
        if parse_expressions(stated) or LETTER.fullmatch(words):
            return str(stated)
    return None


def _find_last_expression(text: str) -> str | None:
    """Return the expression at the end of a text: "2√3" for "The length is 2√3.", "5, 6" for "It is 5 or 6."."""
    text = BOLD.sub(r"\1", text)
    several = ALTERNATIVES.search(text.strip().rpartition("\n")[2])
    if several and all(parse_expressions(f"\\boxed{{{normalize_latex(part)}}}") for part in several.groups()):
        return ", ".join(part.strip() for part in several.groups())
    if not (last := LAST_QUANTITY.search(text.strip())):
        return None
    has_word_as_unit = last[1] and last[3].isalpha()
    quantity = f"{last[1] or last[2]} " + (f"\\text{{{last[3]}}}" if has_word_as_unit else last[3])
    return quantity if parse_expressions(f"\\boxed{{{normalize_latex(quantity)}}}") else None


def _is_right(truth: str, text: str) -> bool:
    """Return whether an answer equals the normalized truth, and does not begin with another number: `5 = 6`, `5 \\to 6`
    for 6."""
    answer = normalize_latex(text)
    first = None if "=" in truth or NUMBER_FIRST.match(truth) else NUMBER_FIRST.match(answer)
    return is_equal_answer(truth, answer) and (first is None or is_equal_answer(truth, first[1]))


def is_equal_answer(truth: str, answer: str) -> bool:
    """Return whether an answer equals the ground truth. Both are normalized LaTeX (see `normalize_latex`)."""
    if remove_spacing(truth) == remove_spacing(answer):
        return True
    for compare in (compare_choice_letters, compare_numbers_in_base_notation, compare_clock_times, compare_words):
        if (verdict := compare(truth, answer)) is not None:
            return verdict
    truth, truth_unit = split_unit(join_thousands(truth, answer), answer)
    answer, answer_unit = split_unit(join_thousands(answer, truth), truth)
    if truth_unit and answer_unit and truth_unit != answer_unit:
        return False
    if (_is_math_set(truth) and _is_tuple(answer)) or (_is_tuple(truth) and _is_math_set(answer)):
        return False
    if NAMED_VALUE.search(truth + answer):
        truth, answer = _write_as_tuple(truth), _write_as_tuple(answer)
    if "\\pm" in truth + answer:
        truth, answer = (_expand_plus_minus(text) for text in (truth, answer))
    if bool(PERCENT.search(truth)) == bool(PERCENT.search(answer)):
        return has_equal_expression(_parse_answer(PERCENT.sub("", truth)), _parse_answer(PERCENT.sub("", answer)))
    pairs = itertools.product(_expand_percent(truth), _expand_percent(answer))
    return any(has_equal_expression(_parse_answer(gold), _parse_answer(text)) for gold, text in pairs)


def _write_as_tuple(text: str) -> str:
    """Rewrite named values in any order, `y = 2, x = 1`, as a tuple: `(1, 2)`."""
    parts = [NAMED_VALUE.fullmatch(part.strip()) for part in COMMA.split(text)]
    values = {part[1]: part[2] for part in parts if part}
    return f"({','.join(values[name] for name in sorted(values))})" if len(values) == len(parts) > 1 else text


def _expand_plus_minus(text: str) -> str:
    """Rewrite `1 \\pm x` as `1 + x, 1 - x`; a list is returned unchanged."""
    return text if "\\pm" not in text or "," in text else ", ".join(text.replace("\\pm", sign) for sign in "+-")


def _expand_percent(text: str) -> list[str]:
    """Return the possible values of a percentage: 36 and 36/100 for 36%. Other texts are returned unchanged."""
    bare = PERCENT.sub("", text)
    return [text] if bare == text else [bare, f"\\frac{{{bare}}}{{100}}"]


def parse_expressions(text: str) -> list[object]:
    """Return the possible readings of the final expression in a text (math-verify): sympy objects or strings."""
    return list(parse(text, [EXTRACTION_WITHOUT_UNITS, ExprExtractionConfig()], parsing_timeout=None))


def _parse_answer(answer: str) -> list[object]:
    """Return the possible readings of a normalized answer."""
    readings = parse_expressions(f"\\boxed{{{answer}}}") or parse_expressions(answer)
    return [_replace_imaginary_unit(reading) for reading in readings]


def _replace_imaginary_unit(expression: object) -> object:
    """Replace the letter i by the imaginary unit, except in sums and products, where it may be the index."""
    if not isinstance(expression, sympy.Basic) or expression.has(sympy.Sum, sympy.Product):
        return expression
    if isinstance(expression, sympy.Eq):  # sympy.Eq evaluates itself by default
        return sympy.Eq(*map(_replace_imaginary_unit, expression.args), evaluate=False)
    return expression.subs({symbol: sympy.I for symbol in expression.free_symbols if symbol.name == "i"})


def _is_math_set(text: str) -> bool:
    return text.startswith("\\{") and text.endswith("\\}") and "," in text


def _is_tuple(text: str) -> bool:
    return text.startswith("(") and text.endswith(")") and text.count("(") == 1 and "," in text


def has_equal_expression(truth_expressions: list[object], answer_expressions: list[object]) -> bool:
    """Return whether an expression of the answer equals an expression of the ground truth. May raise sympy errors."""
    errors: list[Exception] = []
    for gold, answer in itertools.product(truth_expressions, answer_expressions):
        try:
            if _is_close(gold, answer) and verify(
                [gold], [answer], allow_set_relation_comp=True, timeout_seconds=None, raise_on_error=True
            ):
                return True
        except Exception as error:  # noqa: BLE001 sympy may raise any exception for model output
            errors.append(error)
    if errors:
        raise errors[0]
    return False


def _is_close(gold: Any, answer: Any) -> bool:
    """Return False if two sympy objects are numbers that differ by more than rounding, else True. This check is needed
    because math-verify rounds tiny numbers to six places and truncates huge ones."""
    if not all(isinstance(number, sympy.Expr) and number.is_number for number in (gold, answer)):
        return True
    value = gold.evalf(NUM_DIGITS)
    if value in (sympy.zoo, sympy.nan):  # the truth 12:00, read as a ratio
        return False
    size, error = abs(value), abs(value - answer.evalf(NUM_DIGITS))
    if not size.is_finite or not error.is_finite:
        return True
    is_decimal = gold.has(sympy.Float) or answer.has(sympy.Float)
    return bool(error <= (ROUNDING if is_decimal else PRECISION) * (size or 1))
