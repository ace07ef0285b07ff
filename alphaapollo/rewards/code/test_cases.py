r"""Read unit tests from a ground truth, which is JSON in one of these forms:

    {"test": "def check(candidate): ...", "entry_point": "f", "prompt": "def f(x):\n"}   (HumanEval)
    {"asserts": ["assert f(2) == 4"], "setup": "import math"}                              (MBPP)
    {"inputs": ["1 2\n"], "outputs": ["3\n"]}                                              (stdin and stdout)
    {"inputs": [[1, 2]], "outputs": [3], "entry_point": "add"}                             (arguments and results)

Each form accepts "time_limit", the seconds for one run of the code.
"""

from __future__ import annotations

import ast
import builtins
import json
from dataclasses import dataclass

from alphaapollo.utils.json_types import JsonObject

TIME_LIMIT = 4.0  # seconds for one run of the code


@dataclass(frozen=True)
class FunctionTests:
    """Tests that call functions of the answer."""

    test_code: str
    setup_code: str  # runs before the tests, and before the answer
    function_names: tuple[str, ...]  # names of the answer's functions that the tests call
    candidate_name: str = ""  # name of the function to pass to `check(candidate)`; empty: running the code is the test


@dataclass(frozen=True)
class ProgramTests:
    """Tests that run the answer as a program, each with one stdin and the expected stdout."""

    inputs: list[str]
    outputs: list[str]


def read_tests_and_time_limit(ground_truth: str | None) -> tuple[FunctionTests | ProgramTests, float]:
    """Return the unit tests in a ground truth, and the time limit in seconds for one run of the tested code. Raises
    ValueError if the ground truth is malformed."""
    try:
        fields = json.loads(ground_truth or "")
        return _parse_tests(fields), float(fields.get("time_limit") or TIME_LIMIT)
    except (AttributeError, KeyError, TypeError, ValueError, SyntaxError, RecursionError) as error:
        keys = "test and entry_point, or asserts, or inputs and outputs"
        raise ValueError(f"the ground truth must be JSON with {keys} ({type(error).__name__}: {error})") from error


def _parse_tests(fields: JsonObject) -> FunctionTests | ProgramTests:
    prompt, setup, entry = fields.get("prompt") or "", fields.get("setup") or "", fields.get("entry_point")
    if not isinstance(prompt, str) or not isinstance(setup, str):
        raise TypeError("the fields 'prompt' and 'setup' must be strings of Python code")
    if "test" in fields:
        entry = fields["entry_point"]
        if not isinstance(fields["test"], str) or not isinstance(entry, str) or not entry.isidentifier():
            raise TypeError("the field 'test' must be Python code as text, and 'entry_point' must be a function's name")
        return FunctionTests(fields["test"], prompt, (entry,), entry)
    if "asserts" in fields:
        text = "\n".join(fields["asserts"])
        return FunctionTests(text, setup, find_undefined_functions(text, setup))
    inputs, outputs = fields["inputs"], fields["outputs"]
    if len(inputs) != len(outputs) or not inputs:
        raise ValueError(
            f"inputs and outputs must have equal lengths of at least 1, not {len(inputs)} and {len(outputs)}"
        )
    if entry:
        pairs = zip(inputs, outputs, strict=True)
        text = "\n".join(f"assert {entry}(*{args!r}) == {result!r}" for args, result in pairs)
        return FunctionTests(text, prompt, (entry,))
    return ProgramTests([str(text) for text in inputs], [str(text) for text in outputs])


def find_undefined_functions(asserts: str, setup: str) -> tuple[str, ...]:
    """Return the names of the functions that the asserts call but neither Python nor the setup code defines. Raises
    ValueError if there is none, SyntaxError if the code is not valid Python."""
    known = set(dir(builtins))
    for node in ast.walk(ast.parse(f"{setup}\n{asserts}")):
        if isinstance(node, ast.Import | ast.ImportFrom):
            known |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            known.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            known.add(node.id)
    calls = [node.func for node in ast.walk(ast.parse(asserts)) if isinstance(node, ast.Call)]
    names = dict.fromkeys(call.id for call in calls if isinstance(call, ast.Name) and call.id not in known)
    if not names:
        raise ValueError("the asserts call no function of the answer, only functions of Python and of the setup code")
    return tuple(names)
