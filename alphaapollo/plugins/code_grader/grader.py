"""Grader of code: unit tests in the sandbox. Tests and code run in separate processes.

test process: run tests -> a call of the answer's function -> code process -> result -> test process
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import socket
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal, InvalidOperation
from pathlib import Path

from alphaapollo.plugins.code_grader.problem_tests import (
    FunctionTests,
    ProgramTests,
    join_code,
    read_tests_and_time_limit,
)
from alphaapollo.plugins.code_grader.sandbox_program import CALLED, ENDED
from alphaapollo.rewards.base import make_accuracy_score, make_wrong_format_score
from alphaapollo.tools.sandbox import SandboxResult, SandboxStatus, get_default_sandbox, run_python, run_python_async
from alphaapollo.types import Prompt, Score
from alphaapollo.utils.redaction import replace_control_characters
from alphaapollo.utils.thoughts import remove_thoughts

TESTS_TIMEOUT = 5.0  # seconds of the tests, in addition to those of the code
MAX_REASON = 500  # characters of a failure reason
MAX_OUTPUT = 8 << 20  # bytes of output of a sandboxed process
RELATIVE_TOLERANCE, TOLERANCE = 1e-5, 1e-6  # of numbers in a program's output; relative as in APPS and prime_code
LANGUAGE = re.compile(r"[ \t]*+([\w+-]*+)")
BLOCK_END = re.compile(r"\n[ \t]*+```")
SANDBOX_PROGRAM = Path(__file__).with_name("sandbox_program.py")

get_default_sandbox().start()  # started at import, because import time does not count as grading time


def grade_code(prompt: Prompt, completion: str) -> Score:
    """Return a score of 1 if the completion's code passes all unit tests of the ground truth, else 0 with the reason.
    Raises ValueError if the ground truth is malformed or its tests are broken."""
    tests, time_limit = read_tests_and_time_limit(prompt.ground_truth)
    code = extract_code(completion)
    if not code.strip():
        return make_wrong_format_score("no code in the answer")
    code = join_code(tests.setup_code, code)
    if isinstance(tests, ProgramTests):
        failure = find_program_test_failure(tests, code, time_limit)
    else:
        failure = find_function_test_failure(tests, code, time_limit)
    return replace(make_accuracy_score(not failure), reason=_make_line(failure))


def answer_code(prompt: Prompt) -> None:
    """Return None, because tests have no answer. Raises ValueError if the tests cannot be read, or fail to run."""
    tests, time_limit = read_tests_and_time_limit(prompt.ground_truth)
    if isinstance(tests, FunctionTests):
        find_function_test_failure(tests, "", time_limit)


grade_code.make_answer = answer_code  # type: ignore[attr-defined]  # docs/plugins.md


def _make_line(text: str) -> str:
    """Return the first MAX_REASON characters of a text in one line without control characters."""
    return replace_control_characters(" ".join(text[:MAX_REASON].split()))


def extract_code(completion: str) -> str:
    """Return the last fenced Python block after the thoughts, else the last fenced block, else the complete answer."""
    answer = remove_thoughts(completion)
    blocks = list(_find_blocks(answer))
    python = [text for language, text in blocks if language.lower() in ("python", "py", "python3")]
    return (python or [text for _, text in blocks] or [answer])[-1]


def _find_blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield language and content of each fenced block, in time linear in the length of the text."""
    start = text.find("```")
    while start >= 0 and (line_end := text.find("\n", start)) >= 0:
        language, closing = LANGUAGE.match(text, start + 3), BLOCK_END.search(text, line_end + 1)
        yield language[1] if language else "", text[line_end + 1 : closing.start() if closing else None]
        start = text.find("```", closing.end()) if closing else -1


def find_function_test_failure(tests: FunctionTests, code: str, time_limit: float) -> str:
    """Return why the code, which includes the setup code, fails the tests; empty if it passes. Raises ValueError if the
    tests are broken: they fail before their first call of the answer's functions."""
    library = SANDBOX_PROGRAM.read_text(encoding="utf-8")
    request = {"tests": tests.test_code, "setup": tests.setup_code, "function": tests.function_name}
    stdin = json.dumps({**request, "seconds": time_limit})
    ours, theirs = socket.socketpair()

    async def run() -> tuple[SandboxResult, str]:
        limits = {"timeout": time_limit + TESTS_TIMEOUT, "max_output": MAX_OUTPUT}
        code_run = asyncio.create_task(
            run_python_async(f"{library}\nrun_answer({code!r})", connection=theirs, **limits)
        )
        tested = await run_python_async(f"{library}\nrun_tests()", stdin=stdin, connection=ours, **limits)
        failure = _read_failure(tested)
        if failure == ENDED:
            answered = await code_run
            failure = f"the code ends with {answered.status}: {answered.reason or 'before it answers all calls'}"
        return tested, failure  # and asyncio.run cancels code_run, which kills it

    tested, failure = asyncio.run(run())
    if CALLED not in tested.stderr:
        failure = failure or "they do not call the answer's functions"
        raise ValueError(f"the tests in the ground truth are broken: {_make_line(failure)}")
    return failure


def _read_failure(tested: SandboxResult) -> str:
    """Return the verdict in the last line of the tests' stderr, which the answer's process cannot write."""
    if tested.status is not SandboxStatus.OK:
        return f"the tests end with {tested.status}: {tested.reason}"
    return str(json.loads(tested.stderr.rpartition("\n")[2])["failure"])


def find_program_test_failure(tests: ProgramTests, code: str, time_limit: float) -> str:
    """Run the code once per test with the test's stdin. Return why the first failing test fails; empty if all pass."""
    for index, (stdin, expected) in enumerate(zip(tests.inputs, tests.outputs, strict=True)):
        result = run_python(code, stdin=stdin, timeout=time_limit, max_output=MAX_OUTPUT)
        if result.status is not SandboxStatus.OK:
            return f"test {index}: the code ends with {result.status}: {result.reason}"
        if not is_same_output(expected, result.stdout):
            return f"test {index}: the output is {result.stdout[:80]!r}, expected {expected[:80]!r}"
    return ""


def is_same_output(expected: str, printed: str) -> bool:
    """Return whether two outputs have the same words in each line, ignoring blank lines. Decimal numbers may differ by
    RELATIVE_TOLERANCE or TOLERANCE."""
    rows = [[line.split() for line in text.splitlines() if line.strip()] for text in (expected, printed)]
    if [len(row) for row in rows[0]] != [len(row) for row in rows[1]]:
        return False
    tokens = [[token for row in side for token in row] for side in rows]
    return all(one == other or _is_same_number(one, other) for one, other in zip(*tokens, strict=True))


def _is_same_number(expected: str, printed: str) -> bool:
    """Return whether two texts are equal finite numbers, up to rounding if `expected` has a decimal point."""
    try:
        one, other = Decimal(expected), Decimal(printed)
    except InvalidOperation:
        return False
    if not (one.is_finite() and other.is_finite()):
        return False
    if "." not in expected:
        return one == other
    return math.isfinite(float(one)) and math.isclose(one, other, rel_tol=RELATIVE_TOLERANCE, abs_tol=TOLERANCE)
