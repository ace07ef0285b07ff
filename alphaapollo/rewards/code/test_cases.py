r"""Unit tests as a ground truth holds them: JSON, one of

    {"test": "def check(candidate): ...", "entry_point": "f", "prompt": "def f(x):\n"}   (HumanEval)
    {"asserts": ["assert f(2) == 4"], "setup": "import math"}                              (MBPP)
    {"inputs": ["1 2\n"], "outputs": ["3\n"]}                                              (stdin and stdout)
    {"inputs": [[1, 2]], "outputs": [3], "entry_point": "add"}                             (arguments and results)

each with an optional "time_limit": seconds for one run of the code.
"""

from __future__ import annotations

import ast
import builtins
import json
from dataclasses import dataclass

TIME_LIMIT = 4.0  # seconds for one run of the code


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


def read_tests(truth: str | None) -> tuple[Tests | Pairs, float]:
    """The tests in a ground truth, and the time limit of one run (ValueError: what is wrong with it)."""
    try:
        fields = json.loads(truth or "")
        time_limit = float(fields.get("time_limit") or TIME_LIMIT)
        if not all(isinstance(fields.get(key) or "", str) for key in ("prompt", "setup")):
            raise TypeError("prompt and setup must be code")
        if "test" in fields:
            entry = fields["entry_point"]
            if not isinstance(fields["test"], str) or not isinstance(entry, str) or not entry.isidentifier():
                raise TypeError("test must be code, and entry_point a name")
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
    except (AttributeError, KeyError, TypeError, ValueError, SyntaxError, RecursionError) as error:
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
