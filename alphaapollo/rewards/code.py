r"""Code, judged by unit tests in the sandbox; the verdict is decided in another process than the code runs in.

The ground truth is JSON, one of
    {"test": "def check(candidate): ...", "entry_point": "f", "prompt": "def f(x):\n"}   (HumanEval)
    {"asserts": ["assert f(2) == 4"], "setup": "import math"}                              (MBPP)
    {"inputs": ["1 2\n"], "outputs": ["3\n"]}                                              (stdin and stdout)
    {"inputs": [[1, 2]], "outputs": [3], "entry_point": "add"}                             (arguments and results)
and may have a "time_limit": seconds for one run of the code.

    tests, in one sandboxed process -> the calls they make -> the code, in another -> results -> tests -> verdict
"""

from __future__ import annotations

import ast
import builtins
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alphaapollo.tools.sandbox import SandboxResult, Status, default_sandbox, run_python
from alphaapollo.types import Outcome, Prompt, Score

TIME_LIMIT = 4.0  # seconds for one run of the code
TEST_TIME = 5.0  # for one run of the tests; longer is a failure of theirs
MAX_ROUNDS = 10  # of calls whose arguments come from results
MAX_OUTPUT = 8 << 20  # bytes of results
TOLERANCE = 1e-6  # of numbers in a program's output, relative and absolute
BLOCK = re.compile(r"```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:\n[ \t]*```|\Z)", re.DOTALL)
INSIDE = Path(__file__).with_name("code_inside.py")

default_sandbox().start()  # here, for imports are not counted as grading time


@dataclass(frozen=True)
class Tests:
    """Tests that call functions."""

    text: str
    setup: str  # code that both sides run first
    names: tuple[str, ...]  # functions of the answer
    check: str = ""  # the function that the text's `check(candidate)` gets; empty: the text tests by itself


@dataclass(frozen=True)
class Pairs:
    """What a program reads and has to print."""

    inputs: list[str]
    outputs: list[str]


def grade(prompt: Prompt, completion: str) -> Score:
    """1 if the code passes all tests, else 0, with the reason; wrong format where there is no code.

    Raises:
        ValueError: the ground truth cannot be read, or the tests are broken. SandboxError: nothing is known.
    """
    tests, time_limit = read_tests(prompt.ground_truth)
    code = extract_code(completion)
    if not code.strip():
        return Score(0.0, {"accuracy": 0.0}, Outcome.WRONG_FORMAT, "no code in the answer")
    why = run_pairs(tests, code, time_limit) if isinstance(tests, Pairs) else run_tests(tests, code, time_limit)
    accuracy = float(not why)
    return Score(accuracy, {"accuracy": accuracy}, reason=why)


def extract_code(completion: str) -> str:
    """The last fenced block after the thoughts (one marked as Python, if there is any), else the whole text."""
    answer = completion.rpartition("</think>")[2]
    blocks = BLOCK.findall(answer)
    python = [text for language, text in blocks if language.lower() in ("python", "py", "python3")]
    return (python or [text for _, text in blocks] or [answer])[-1]


def read_tests(truth: str | None) -> tuple[Tests | Pairs, float]:
    """The tests in a ground truth, and the time limit of one run (ValueError: what is wrong with it)."""
    try:
        fields = json.loads(truth or "")
        time_limit = float(fields.get("time_limit") or TIME_LIMIT)
        if "test" in fields:
            entry = fields["entry_point"]
            return Tests(fields["test"], fields.get("prompt") or "", (entry,), entry), time_limit
        if "asserts" in fields:
            setup, text = fields.get("setup") or "", "\n".join(fields["asserts"])
            return Tests(text, setup, called_names(text, setup)), time_limit
        if len(fields["inputs"]) != len(fields["outputs"]) or not fields["inputs"]:
            raise ValueError("inputs and outputs must be of one length, at least 1")
        if entry := fields.get("entry_point"):
            pairs = zip(fields["inputs"], fields["outputs"], strict=True)
            text = "\n".join(f"assert {entry}(*{args!r}) == {result!r}" for args, result in pairs)
            return Tests(text, fields.get("prompt") or "", (entry,)), time_limit
        return Pairs([str(text) for text in fields["inputs"]], [str(text) for text in fields["outputs"]]), time_limit
    except (AttributeError, KeyError, TypeError, ValueError, SyntaxError) as error:
        wanted = "test and entry_point, asserts, or inputs and outputs"
        raise ValueError(f"the ground truth is not JSON with {wanted} ({type(error).__name__}: {error})") from error


def called_names(text: str, setup: str) -> tuple[str, ...]:
    """The functions that asserts call and that neither Python nor the setup defines: the answer's.

    Raises:
        ValueError: there is none. SyntaxError.
    """
    known = set(dir(builtins))
    for node in ast.walk(ast.parse(f"{setup}\n{text}")):
        if isinstance(node, ast.Import | ast.ImportFrom):
            known |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            known.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            known.add(node.id)
    calls = [node.func for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    names = dict.fromkeys(call.id for call in calls if isinstance(call, ast.Name) and call.id not in known)
    if not names:
        raise ValueError("the asserts call no function of the answer")
    return tuple(names)


def run_tests(tests: Tests, code: str, time_limit: float) -> str:
    """Why the code fails the tests; empty if it passes (ValueError: the tests are broken)."""
    inside = INSIDE.read_text(encoding="utf-8")
    program = f"{inside}\nrun_answer({tests.setup + chr(10) + code!r})"
    request = {"tests": tests.text, "setup": tests.setup, "names": tests.names, "check": tests.check}
    known: list[list[Any]] = []
    for _ in range(MAX_ROUNDS):
        stdin = json.dumps({**request, "known": known})
        tested = run_python(f"{inside}\nrun_tests()", stdin=stdin, timeout=TEST_TIME, max_output=MAX_OUTPUT)
        verdict = _reply(tested)
        if not isinstance(verdict, dict) or "broken" in verdict:
            what = verdict["broken"] if isinstance(verdict, dict) else tested.reason or tested.status
            raise ValueError(f"the tests are broken: {what}")
        if "passed" in verdict:
            return "" if verdict["passed"] else verdict["why"] or "a test fails"
        calls = verdict["calls"]
        answered = run_python(program, stdin=json.dumps(calls), timeout=time_limit, max_output=MAX_OUTPUT)
        results = _reply(answered)
        if isinstance(results, dict) and "broken" in results:
            return str(results["broken"])
        if not isinstance(results, list) or len(results) != len(calls):
            return f"the code ends with {answered.status}: {answered.reason or 'before it answers all calls'}"
        known = [list(pair) for pair in zip(calls, results, strict=True)]
    raise ValueError(f"the tests are broken: their calls depend on results more than {MAX_ROUNDS} deep")


def _reply(result: SandboxResult) -> Any:
    """The JSON on the last line that was printed; None if there is none."""
    try:
        return json.loads(result.stdout.rpartition("\n")[2])
    except ValueError:
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
    """Equal but for white space at the ends of lines and of the text, and for the last digits of numbers."""
    rows = [[line.split() for line in text.strip().splitlines()] for text in (wanted, printed)]
    if [len(row) for row in rows[0]] != [len(row) for row in rows[1]]:
        return False
    tokens = [[token for row in side for token in row] for side in rows]
    return all(one == other or _same_number(one, other) for one, other in zip(*tokens, strict=True))


def _same_number(one: str, other: str) -> bool:
    try:
        return "." in one + other and math.isclose(float(one), float(other), rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except ValueError:
        return False
