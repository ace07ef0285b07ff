"""Code graded by unit tests in the sandbox. The verdict is computed in another process than the code runs in.

tests, in one sandboxed process -> their calls -> the code, in another one -> results -> tests -> verdict
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from alphaapollo.rewards.base import make_accuracy_score, make_wrong_format_score
from alphaapollo.rewards.code.sandbox_program import MAX_DEPTH
from alphaapollo.rewards.code.test_cases import FunctionTests, ProgramTests, read_tests
from alphaapollo.tools.sandbox import SandboxResult, Status, get_default_sandbox, run_python
from alphaapollo.types import Prompt, Score

TESTS_TIMEOUT = 5.0  # seconds for one run of the tests
MAX_ROUNDS = 2 * MAX_DEPTH + 1  # a chain of calls may lose some rounds if another chain makes equal calls
MAX_REASON = 500  # characters
MAX_OUTPUT = 8 << 20  # bytes of results
TOLERANCE = 1e-6  # of numbers in a program's output, relative and absolute
BLOCK = re.compile(r"```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:\n[ \t]*```|\Z)", re.DOTALL)
SANDBOX_PROGRAM = Path(__file__).with_name("sandbox_program.py")

get_default_sandbox().start()  # at import, which does not count as grading time


def grade(prompt: Prompt, completion: str) -> Score:
    """1 if the code passes all tests, else 0 with the reason. Wrong format: no code.

    Any behaviour of the code gives a reward, so that code cannot avoid one (except by using up reward.timeout).

    Raises:
        ValueError: the ground truth is malformed, or the tests fail without the code.
        SandboxError: the sandbox failed.
    """
    tests, time_limit = read_tests(prompt.ground_truth)
    code = extract_code(completion)
    if not code.strip():
        return make_wrong_format_score("no code in the answer")
    if isinstance(tests, ProgramTests):
        problem = run_program_tests(tests, code, time_limit)
    else:
        problem = run_function_tests(tests, code, time_limit)
    return replace(make_accuracy_score(not problem), reason=escape(problem))


def escape(text: str) -> str:
    """Shorten to MAX_REASON characters, with escapes for control characters.

    >>> escape("red: " + chr(27) + "[31m")
    'red: \\\\x1b[31m'
    """
    shown = (char if char.isprintable() else char.encode("unicode_escape").decode() for char in text[:MAX_REASON])
    return "".join(shown)[:MAX_REASON]


def extract_code(completion: str) -> str:
    """Return the last fenced block after the thoughts (a Python one if there is any), else the whole text."""
    answer = completion.rpartition("</think>")[2]
    blocks = BLOCK.findall(answer)
    python = [text for language, text in blocks if language.lower() in ("python", "py", "python3")]
    return (python or [text for _, text in blocks] or [answer])[-1]


def run_function_tests(tests: FunctionTests, code: str, time_limit: float) -> str:
    """Return why the code fails the tests; empty if it passes (ValueError: the tests are broken).

    The first round knows no results and depends on the tests alone, so a failure in it is theirs.
    """
    library = SANDBOX_PROGRAM.read_text(encoding="utf-8")
    program = f"{library}\nrun_answer({tests.setup + chr(10) + code!r})"
    request = {"tests": tests.text, "setup": tests.setup, "names": tests.names, "check": tests.check}
    known: list[list[Any]] = []
    for _ in range(MAX_ROUNDS):
        try:
            stdin = json.dumps({**request, "known": known})
        except RecursionError:
            return "its results are nested too deeply"
        tested = run_python(f"{library}\nrun_tests()", stdin=stdin, timeout=TESTS_TIMEOUT, max_output=MAX_OUTPUT)
        verdict = _read_reply(tested)
        problem = "" if isinstance(verdict, dict) else f"the tests end with {tested.status}: {tested.reason}"
        problem = problem or verdict.get("broken") or verdict.get("failure", "")
        if not known and (problem or "calls" not in verdict):
            raise ValueError(f"the tests are broken: {escape(problem or 'they do not call the answer')}")
        if problem or "passed" in verdict:
            return problem
        calls = verdict["calls"]
        answered = run_python(program, stdin=json.dumps(calls), timeout=time_limit, max_output=MAX_OUTPUT)
        results = _read_reply(answered)
        if isinstance(results, dict) and "broken" in results:
            return results["broken"] if isinstance(results["broken"], str) else "the code fails"
        if not isinstance(results, list) or len(results) != len(calls):
            return f"the code ends with {answered.status}: {answered.reason or 'before it answers all calls'}"
        known = [list(pair) for pair in zip(calls, results, strict=True)]
    return f"after {MAX_ROUNDS} rounds its results still lead to other calls"


def _read_reply(result: SandboxResult) -> Any:
    """Read the JSON on the last printed line; None if there is none."""
    try:
        return json.loads(result.stdout.rpartition("\n")[2])
    except (ValueError, RecursionError):
        return None


def run_program_tests(tests: ProgramTests, code: str, time_limit: float) -> str:
    """Return why the program fails its first failing test; empty if it passes."""
    for index, (stdin, expected) in enumerate(zip(tests.inputs, tests.outputs, strict=True)):
        result = run_python(code, stdin=stdin, timeout=time_limit, max_output=MAX_OUTPUT)
        if result.status is not Status.OK:
            return f"test {index}: the code ends with {result.status}: {result.reason}"
        if not is_same_output(expected, result.stdout):
            return f"test {index}: it prints {result.stdout[:80]!r}, not {expected[:80]!r}"
    return ""


def is_same_output(expected: str, printed: str) -> bool:
    """Whether the words of all lines are equal, up to rounding of the numbers expected with a decimal point."""
    rows = [[line.split() for line in text.strip().splitlines()] for text in (expected, printed)]
    if [len(row) for row in rows[0]] != [len(row) for row in rows[1]]:
        return False
    tokens = [[token for row in side for token in row] for side in rows]
    return all(one == other or _is_same_number(one, other) for one, other in zip(*tokens, strict=True))


def _is_same_number(expected: str, printed: str) -> bool:
    """Whether two finite numbers are equal: `3.0` is 3, but only a number expected with a point may be rounded."""
    try:
        one, other = Decimal(expected), Decimal(printed)
    except InvalidOperation:
        return False
    if not (one.is_finite() and other.is_finite()):
        return False
    if "." not in expected:
        return one == other
    return math.isfinite(float(one)) and math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
