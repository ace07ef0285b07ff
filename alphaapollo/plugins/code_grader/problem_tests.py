r"""Read the unit tests of a code problem from a ground truth. docs/rewards.md has a table of the shapes.

A ground truth is a value of a data file, or its text as JSON or in Python's notation:

    {"inputs": ["1 2\n"], "outputs": ["3\n"]}                               (APPS, TACO, prime_code: stdin and stdout)
    {"inputs": ["1\n2"], "outputs": ["3"], "fn_name": "add"}               (the same: arguments and results as JSON)
    [{"input": "1\n2", "output": "3", "testtype": "functional", "metadata": {"func_name": "add"}}]     (LiveCodeBench)
    {"test": "def check(candidate): ...", "entry_point": "f", "prompt": "def f(x): ..."}                    (HumanEval)
    {"asserts": ["assert f(2) == 4"], "setup": "import math"}                                          (MBPP, AceCode)
"""

from __future__ import annotations

import ast
import base64
import json
import pickletools
import re
import zlib
from collections import defaultdict
from dataclasses import dataclass

from alphaapollo.utils.json_types import Json, JsonObject
from alphaapollo.utils.literals import drop_none, read_literal

TIME_LIMIT = 4.0  # seconds for one run of the code
MAX_UNPACKED = 1 << 28  # bytes of compressed tests
KEYS = {
    name: key
    for key, names in {
        "inputs": "input inputs",
        "outputs": "output outputs expected_output",
        "tests": "tests test_cases unit_tests input_output official_tests public_tests private_tests generated_tests"
        " public_test_cases private_test_cases metadata",
        "function": "entry_point fn_name func_name function_name",
        "code": "test asserts test_list challenge_test_list test_code functional",
        "setup": "setup test_setup_code test_imports import_prefix",
        **{key: key for key in ("prompt", "language")},
        "type": "type testtype",
        "time_limit": "time_limit timeout",
        "not_read": "id task_id problem_id question_id difficulty source explanation memory_limit test_info",
    }.items()
    for name in names.split()
}
MODULES = (
    "string re datetime collections heapq bisect copy math random statistics itertools functools operator io sys json"
)
# The peers' graders of inputs and outputs import these names before an answer, which uses `List` and `deque` as given.
IMPORTS = "\n".join(f"from {module} import *" for module in (*MODULES.split(), "typing", "builtins"))
IMPORTS += f"\nimport {', '.join(MODULES.split())}\nsys.setrecursionlimit(50_000)\n"
FUTURE = re.compile(r"^from __future__ import .*\n?", re.MULTILINE)


@dataclass(frozen=True)
class FunctionTests:
    """Tests that call functions of the answer."""

    test_code: str
    setup_code: str  # runs before the tests, and before the answer
    function_name: str = ""  # name of the answer's function; empty: each name that the tests do not define


@dataclass(frozen=True)
class ProgramTests:
    """Tests that run the answer as a program, each with one stdin and the expected stdout."""

    inputs: list[str]
    outputs: list[str]
    setup_code: str = IMPORTS  # runs before the answer


def read_tests_and_time_limit(ground_truth: object) -> tuple[FunctionTests | ProgramTests, float]:
    """Return the unit tests in a ground truth, and the time limit in seconds for one run of the tested code. Raises
    ValueError for a ground truth without tests, with an unknown key, or with tests that cannot be read."""
    parts: dict[str, list[Json]] = defaultdict(list)
    try:
        _collect_parts(drop_none(ground_truth), parts)
        return _make_tests(parts), _read_seconds(parts["time_limit"])
    except (AttributeError, TypeError, ValueError, SyntaxError, RecursionError, zlib.error) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"the tests in the ground truth {ground_truth!r:.80} cannot be read ({reason}). docs/rewards.md lists "
            "the shapes."
        ) from error


def _collect_parts(value: object, parts: dict[str, list[Json]], is_record: bool = False) -> None:
    """Append the values of a ground truth to `parts`, by the keys of KEYS. A record has one `input` and `output`."""
    if isinstance(value, str):
        text = _unpack(value)
        if (value := read_literal(text, has_answers=True)) is None:
            parts["code"].append(text)
            return
    if isinstance(value, list):
        for item in value:
            _collect_parts(item, parts, is_record=True)
    elif isinstance(value, dict):
        for name, item in value.items():
            if (key := KEYS.get(name)) is None:
                raise ValueError(f"the key {name!r} is unknown. Known keys: {', '.join(KEYS)}")
            if item is not None and key == "tests":
                _collect_parts(item, parts)
            elif item is not None:
                is_one = not isinstance(item, list) or (is_record and key in ("inputs", "outputs") and key != name)
                parts[key] += [item] if is_one else item
    elif value is not None:
        raise TypeError(f"{value!r:.80} is a {type(value).__name__}")


def _unpack(text: str) -> str:
    """Return LiveCodeBench's compressed tests (base64 of zlib of a pickled string) as text; other text unchanged. The
    pickle is scanned, not loaded, because loading it could run code."""
    if not re.fullmatch(r"eJ[\w+/]{20,}={0,2}\s*", text, re.ASCII):
        return text
    unpacking = zlib.decompressobj()
    data = unpacking.decompress(base64.b64decode(text), MAX_UNPACKED)
    if unpacking.unconsumed_tail:
        raise ValueError(f"the compressed tests are larger than {MAX_UNPACKED} bytes")
    texts = [argument for _, argument, _ in pickletools.genops(data) if isinstance(argument, str)]
    if len(texts) != 1:
        raise ValueError("the compressed tests are not a pickled string. Store them as JSON.")
    return texts[0]


def _make_tests(parts: dict[str, list[Json]]) -> FunctionTests | ProgramTests:
    inputs, outputs, code = parts["inputs"], parts["outputs"], "\n".join(parts["code"])
    if others := [name for name in parts["language"] if "python" not in name.lower()]:
        raise ValueError(f"the language is {others[0]!r}, but only Python can be tested")
    names = {name.removeprefix("Solution").removeprefix("()").removeprefix(".") for name in parts["function"] if name}
    if len(names) > 1 or not all(map(str.isidentifier, names)):
        raise ValueError(f"the tests need the name of one function, not {', '.join(sorted(names))}")
    setup = "\n".join(parts["setup"] + [text for text in parts["prompt"] if _is_code(text)])
    if bool(code.strip()) == bool(inputs or outputs):
        raise ValueError(f"it has {'code and inputs' if inputs else 'no tests'}")
    if code.strip():
        ast.parse(code)
        return FunctionTests(code, setup, next(iter(names), ""))
    if len(inputs) != len(outputs):
        raise ValueError(f"inputs and outputs must have equal lengths, not {len(inputs)} and {len(outputs)}")
    if not names:
        if any("func" in kind or "call" in kind for kind in parts["type"]):
            raise ValueError("tests that call a function need its name. Add the key fn_name")
        return ProgramTests([*map(_join_lines, inputs)], [*map(_join_lines, outputs)], IMPORTS + setup)
    calls = [_read_call(given, result) for given, result in zip(inputs, outputs, strict=True)]
    wrapped = [result for _, result in calls if isinstance(result, list) and len(result) == 1]  # APPS: [result]
    accepted = [[result] for _, result in calls]
    if len(wrapped) == len(calls):
        accepted = [[result, result[0]] for result in wrapped]
    name = names.pop()
    tests = zip(calls, accepted, strict=True)
    text = "\n".join(f"assert is_same_result({name}({call}), {results!r})" for (call, _), results in tests)
    own_name = f"globals().pop({name!r}, None)\n"  # a function of the answer, not one of IMPORTS such as operator.add
    return FunctionTests(text, IMPORTS + own_name + setup, name)


def _is_code(text: str) -> bool:
    """Return whether a prompt is Python code, perhaps incomplete (`def f(x):`), and not a question."""
    try:
        return any(not isinstance(node, ast.Expr) for node in ast.parse(text).body)
    except SyntaxError:
        return text.lstrip().startswith(("def ", "class ", "import ", "from ", "@"))


def _read_call(given: object, result: object) -> tuple[str, object]:
    """Return the arguments of a call as code, and its result. In text, each line is an argument as JSON."""
    if isinstance(given, str):
        given = [_read_value(line) for line in given.split("\n") if line.strip()]
        result = _read_value(result) if isinstance(result, str) else result
    if isinstance(given, dict):
        return f"**{given!r}", result
    arguments = given if isinstance(given, list) else [given]
    if arguments and isinstance(arguments[0], dict) and all(map(str.isdecimal, arguments[0])):  # as APPS does
        arguments = [{int(key): value for key, value in arguments[0].items()}, *arguments[1:]]
    return f"*{arguments!r}", result


def _read_value(text: str) -> object:
    """Read a value in JSON or Python's notation. Raises ValueError or SyntaxError."""
    try:
        return json.loads(text)
    except ValueError:
        return ast.literal_eval(text.strip())


def _join_lines(value: object) -> str:
    """Return stdin or stdout as text. A list has lines, and a list in it has the words of a line."""
    lines = value if isinstance(value, list) else [value]
    return "\n".join(" ".join(map(str, line)) if isinstance(line, list) else str(line) for line in lines)


def _read_seconds(limits: list[float | str | JsonObject]) -> float:
    """Return the last time limit in seconds. Reads 2, `2.0 seconds` (TACO) and {"seconds": 2} (CodeContests)."""
    value = limits[-1] if limits else TIME_LIMIT
    if isinstance(value, dict):
        value = float(value.get("seconds") or 0) + float(value.get("nanos") or 0) / 1e9
    return float(value.removesuffix("seconds") if isinstance(value, str) else value) or TIME_LIMIT


def join_code(setup: str, code: str) -> str:
    """Return the setup code followed by the answer's code, whose `from __future__` lines must come first."""
    return "".join(FUTURE.findall(code)) + f"{setup}\n{FUTURE.sub('', code)}"
