"""Code, judged by unit tests in the sandbox (code_tests.py says which); the verdict is decided in another process than
the code runs in.

    tests, in one sandboxed process -> the calls they make -> the code, in another -> results -> tests -> verdict
"""

from __future__ import annotations

import json
import math
import re
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from alphaapollo.rewards.code.sandbox_program import MAX_DEPTH
from alphaapollo.rewards.code.test_cases import Pairs, Tests, read_tests
from alphaapollo.tools.sandbox import SandboxResult, Status, default_sandbox, run_python
from alphaapollo.types import Outcome, Prompt, Score

TEST_TIME = 5.0  # for one run of the tests; longer is a failure of theirs
MAX_ROUNDS = 2 * MAX_DEPTH + 1  # a chain may lose some, where another one makes equal calls
MAX_REASON = 500  # characters
MAX_OUTPUT = 8 << 20  # bytes of results
TOLERANCE = 1e-6  # of numbers in a program's output, relative and absolute
BLOCK = re.compile(r"```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:\n[ \t]*```|\Z)", re.DOTALL)
INSIDE = Path(__file__).with_name("sandbox_program.py")

default_sandbox().start()  # here, for imports are not counted as grading time


def grade(prompt: Prompt, completion: str) -> Score:
    """1 if the code passes all tests, else 0, with the reason; wrong format where there is no code.

    Whatever the code does is a reward, so that no code can choose to have none (but by using up reward.timeout).

    Raises:
        ValueError: the ground truth cannot be read, or the tests are broken: without the code already.
        SandboxError: nothing is known.
    """
    tests, time_limit = read_tests(prompt.ground_truth)
    code = extract_code(completion)
    if not code.strip():
        return Score(0.0, {"accuracy": 0.0}, Outcome.WRONG_FORMAT, "no code in the answer")
    why = run_pairs(tests, code, time_limit) if isinstance(tests, Pairs) else run_tests(tests, code, time_limit)
    accuracy = float(not why)
    return Score(accuracy, {"accuracy": accuracy}, reason=readable(why))


def readable(text: str) -> str:
    """At most MAX_REASON characters, with escapes for what a terminal would obey.

    >>> readable("red: " + chr(27) + "[31m")
    'red: \\\\x1b[31m'
    """
    shown = (char if char.isprintable() else char.encode("unicode_escape").decode() for char in text[:MAX_REASON])
    return "".join(shown)[:MAX_REASON]


def extract_code(completion: str) -> str:
    """The last fenced block after the thoughts (one marked as Python, if there is any), else the whole text."""
    answer = completion.rpartition("</think>")[2]
    blocks = BLOCK.findall(answer)
    python = [text for language, text in blocks if language.lower() in ("python", "py", "python3")]
    return (python or [text for _, text in blocks] or [answer])[-1]


def run_tests(tests: Tests, code: str, time_limit: float) -> str:
    """Why the code fails the tests; empty if it passes (ValueError: the tests are broken).

    The first round, which knows no results, depends on the tests alone: only what fails there is their failure.
    """
    inside = INSIDE.read_text(encoding="utf-8")
    program = f"{inside}\nrun_answer({tests.setup + chr(10) + code!r})"
    request = {"tests": tests.text, "setup": tests.setup, "names": tests.names, "check": tests.check}
    known: list[list[Any]] = []
    for _ in range(MAX_ROUNDS):
        try:
            stdin = json.dumps({**request, "known": known})
        except RecursionError:
            return "its results are nested too deeply"
        tested = run_python(f"{inside}\nrun_tests()", stdin=stdin, timeout=TEST_TIME, max_output=MAX_OUTPUT)
        verdict = _reply(tested)
        why = "" if isinstance(verdict, dict) else f"the tests end with {tested.status}: {tested.reason}"
        why = why or verdict.get("broken") or verdict.get("why", "")
        if not known and (why or "calls" not in verdict):
            raise ValueError(f"the tests are broken: {readable(why or 'they do not call the answer')}")
        if why or "passed" in verdict:
            return why
        calls = verdict["calls"]
        answered = run_python(program, stdin=json.dumps(calls), timeout=time_limit, max_output=MAX_OUTPUT)
        results = _reply(answered)
        if isinstance(results, dict) and "broken" in results:
            return results["broken"] if isinstance(results["broken"], str) else "the code fails"
        if not isinstance(results, list) or len(results) != len(calls):
            return f"the code ends with {answered.status}: {answered.reason or 'before it answers all calls'}"
        known = [list(pair) for pair in zip(calls, results, strict=True)]
    return f"after {MAX_ROUNDS} rounds its results still lead to other calls"


def _reply(result: SandboxResult) -> Any:
    """The JSON on the last line that was printed; None if there is none."""
    try:
        return json.loads(result.stdout.rpartition("\n")[2])
    except (ValueError, RecursionError):
        return None


def run_pairs(pairs: Pairs, code: str, time_limit: float) -> str:
    """Why the program fails the first of the tests that it fails; empty if it passes."""
    for index, (stdin, wanted) in enumerate(zip(pairs.inputs, pairs.outputs, strict=True)):
        result = run_python(code, stdin=stdin, timeout=time_limit, max_output=MAX_OUTPUT)
        if result.status is not Status.OK:
            return f"test {index}: the code ends with {result.status}: {result.reason}"
        if not same_output(wanted, result.stdout):
            return f"test {index}: it prints {result.stdout[:80]!r}, not {wanted[:80]!r}"
    return ""


def same_output(wanted: str, printed: str) -> bool:
    """Equal but for white space at the ends of lines and of the text, and the last digits of numbers with a point."""
    rows = [[line.split() for line in text.strip().splitlines()] for text in (wanted, printed)]
    if [len(row) for row in rows[0]] != [len(row) for row in rows[1]]:
        return False
    tokens = [[token for row in side for token in row] for side in rows]
    return all(one == other or _same_number(one, other) for one, other in zip(*tokens, strict=True))


def _same_number(wanted: str, printed: str) -> bool:
    """`3.0` is 3; only what is wanted with a point may be rounded. Nothing is the same as infinity."""
    try:
        one, other = Decimal(wanted), Decimal(printed)
    except InvalidOperation:
        return False
    if not (one.is_finite() and other.is_finite()):
        return False
    if "." not in wanted:
        return one == other
    return math.isfinite(float(one)) and math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
