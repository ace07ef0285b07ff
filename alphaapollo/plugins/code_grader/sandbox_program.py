"""Programs that run inside the sandbox to test code. This file is sent there as text, so it has no dependencies.

The two programs run in separate processes, so that an answer can neither read nor change its tests. Their descriptors 1
are connected:

    run_tests    runs the tests; a stub for a function of the answer sends the call, and waits for the result
    run_answer   runs the answer and the calls to its functions, and sends the result or exception of each call
"""

from __future__ import annotations

import builtins
import contextlib
import io
import itertools
import json
import math
import os
import random
import select
import sys
import time
import types
import unittest
from collections.abc import Callable, Iterator
from typing import Any

MAX_ITEMS = 100_000  # items read from an iterator
MAX_TEXT = 500  # characters of an error message
MAX_REPLY = 1 << 26  # bytes of a result
TOLERANCE = 1e-6  # relative and absolute tolerance of a result that is expected to be a float
COLLECTIONS: dict[str, Any] = {one.__name__: one for one in (list, tuple, set, frozenset)} | {"iterator": iter}
CALLED = "the tests call the answer"
ENDED = "the code ends before it answers all calls"


class NonJsonResult:
    """Placeholder in the test process for a result that cannot be sent as JSON. It equals no other value."""

    def __init__(self, text: str):
        self.text = text

    def __repr__(self) -> str:
        return self.text


class ArgumentError(TypeError):
    """Error for an argument of a test's call that cannot be sent as JSON."""


def encode_value(value: Any, non_json: list[object]) -> object:
    """Convert a value to JSON data for `decode_value`. Values that JSON cannot represent are appended to `non_json`."""
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return ["int", hex(value)]
    if kind is float:
        return ["float", value.hex() if math.isfinite(value) else repr(value)]
    if kind in (list, tuple, set, frozenset):
        return [kind.__name__, [encode_value(item, non_json) for item in value]]
    if isinstance(value, dict):
        return ["dict", [[encode_value(key, non_json), encode_value(item, non_json)] for key, item in value.items()]]
    if kind is complex:
        return ["complex", value.real, value.imag]
    if kind is bytes:
        return ["bytes", value.hex()]
    if kind is range:
        return ["range", value.start, value.stop, value.step]
    if kind.__module__ == "numpy":
        return encode_value(value.tolist(), non_json)
    if isinstance(value, Iterator):
        return ["iterator", [encode_value(item, non_json) for item in itertools.islice(value, MAX_ITEMS)]]
    non_json.append(value)
    return ["opaque", repr(value)[:MAX_TEXT]]


def decode_value(data: object) -> Any:
    """Reverse `encode_value`. A value that JSON could not represent becomes an NonJsonResult."""
    if not isinstance(data, list):
        return data
    kind, *parts = data
    if kind in COLLECTIONS:
        return COLLECTIONS[kind](list(map(decode_value, parts[0])))
    kinds: dict[str, Callable[..., object]] = {
        "int": lambda text: int(text, 16),
        "float": lambda text: float(text) if text in ("inf", "-inf", "nan") else float.fromhex(text),
        "dict": lambda pairs: {decode_value(key): decode_value(item) for key, item in pairs},
        "complex": complex,
        "bytes": bytes.fromhex,
        "range": range,
        "opaque": NonJsonResult,
    }
    return kinds[kind](*parts)


class AnswerProcessError(BaseException):
    """Error for the answer's process: it ended, or exceeds its time limit, or the answer's code does not run."""


class AnswerCaller:
    """Caller of the answer's functions, which run in another process. Descriptor 1 is connected to it."""

    def __init__(self, seconds: float):
        self._replies = open(1, "rb", closefd=False)  # noqa: SIM115
        self._seconds = seconds  # time that remains for the answer
        self.has_called = False

    def make_stub(self, name: str) -> Callable[..., object]:
        """Return a function that replaces the answer's function of this name in the tests."""

        def stub(*args: object, **kwargs: object) -> object:
            return self._call(name, args, kwargs)

        stub.__name__ = name
        return stub

    def _call(self, name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        non_json: list[object] = []
        call = [name, encode_value(args, non_json), encode_value(kwargs, non_json)]
        if non_json:
            raise ArgumentError(f"the tests call {name} with an argument that is not plain data (numbers, text, lists)")
        if not self.has_called:
            self.has_called = True
            print(CALLED, file=sys.stderr, flush=True)
        start = time.monotonic()
        try:
            _send(call)
            if not select.select([1], [], [], max(self._seconds, 0))[0]:
                raise AnswerProcessError("the code ends with timeout")
            reply = self._replies.readline(MAX_REPLY)
        except OSError:  # the connection is closed
            reply = b""
        self._seconds -= time.monotonic() - start
        if not reply:
            raise AnswerProcessError(ENDED)
        outcome, value, args_after = json.loads(reply)
        if outcome == "broken":
            raise AnswerProcessError(str(value))
        for arg, content in zip(args, decode_value(args_after), strict=True):
            _replace_content(arg, content)
        if outcome == "returned":
            return decode_value(value)
        kind = getattr(builtins, value[0], Exception)
        raise (kind if isinstance(kind, type) and issubclass(kind, Exception) else Exception)(value[1])


def _send(value: object) -> None:
    """Write a line to descriptor 1."""
    data = memoryview(json.dumps(value).encode() + b"\n")
    while data:
        data = data[os.write(1, data) :]


def _replace_content(container: object, content: Any) -> None:
    """Repeat a change that the tested function made to its copy of an argument: set `container` to `content`."""
    if isinstance(container, list):
        container[:] = content
    elif isinstance(container, dict | set):
        container.clear()
        container.update(content)


def is_same_result(result: object, accepted: list[object]) -> bool:
    """Return whether a result equals an accepted one. Tuples equal lists, and keys of dicts equal their texts, as in
    JSON. A float may differ by TOLERANCE."""
    return any(_is_equal(result, one) for one in accepted)


def _is_equal(one: object, other: object) -> bool:
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        one, other = ({str(key): value for key, value in items.items()} for items in (one, other))
        return one.keys() == other.keys() and all(_is_equal(one[key], other[key]) for key in one)
    if isinstance(other, float) and isinstance(one, int | float):
        return one == other or math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return one == other


class Approx(float):
    """Replaces pytest.approx, because the sandbox does not have pytest."""

    def __eq__(self, other: Any) -> bool:
        return bool(abs(other - self) <= max(1e-12, 1e-6 * abs(self)))


def expect_error(error: Any, match: str = "") -> Any:
    return unittest.TestCase().assertRaisesRegex(error, match)


class TestNamespace(dict[str, Any]):
    """Global variables of the tests. A name that neither Python nor the tests define is a function of the answer."""

    def __init__(self, answer: AnswerCaller):
        super().__init__(__name__="tests", is_same_result=is_same_result)
        self._answer = answer

    def __missing__(self, name: str) -> object:
        if hasattr(builtins, name):
            raise KeyError(name)
        if name == "Solution":
            return type("Solution", (), {"__getattr__": lambda _, method: self._answer.make_stub(method)})
        return self._answer.make_stub(name)


def _run_tests(request: dict[str, Any], answer: AnswerCaller) -> None:
    """Run the setup, then the tests as pytest or HumanEval would. Names that nothing defines are stubs of the answer's
    functions (TestNamespace)."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    namespace = TestNamespace(answer)
    sys.modules["pytest"] = types.SimpleNamespace(approx=Approx, raises=expect_error)  # type: ignore[assignment]
    sys.modules["solution"] = types.ModuleType("solution")  # `from solution import f` of KodCode
    sys.modules["solution"].__getattr__ = namespace.__missing__  # type: ignore[method-assign]
    try:
        exec(request["setup"], namespace)
    except IndentationError:  # it ends with the first line of a function, which the answer continues
        exec(request["setup"] + "\n    pass", namespace)
    if request["function"]:
        namespace[request["function"]] = answer.make_stub(request["function"])
    names_before_tests = {*namespace}
    exec(compile(request["tests"], "<tests>", "exec"), namespace)
    tests = {name: test for name, test in namespace.items() if name not in names_before_tests}
    if request["function"] and "check" in tests:  # HumanEval
        tests["check"](namespace[request["function"]])
    for name, test in tests.items():  # as pytest finds tests
        if name.startswith("test") and isinstance(test, types.FunctionType):
            test()
        elif name.startswith("Test") and isinstance(test, type):
            for method in [method for method in vars(test) if method.startswith("test")]:
                getattr(test(), method)()


def run_tests() -> None:
    """Read {tests, setup, function, is_check, seconds} as JSON from stdin and run the tests. Print to stderr CALLED
    before the first call, and {failure} at the end, which is empty if the tests pass."""
    request = json.load(sys.stdin)
    sys.stdout, failure = io.StringIO(), ""
    answer = AnswerCaller(request["seconds"])
    try:
        _run_tests(request, answer)
    except BaseException as error:  # noqa: BLE001 any exception fails the tests
        kind = "" if isinstance(error, AnswerProcessError) else f"{type(error).__name__}: "
        failure = kind + str(error)[:MAX_TEXT]
    print("\n" + json.dumps({"failure": failure}), end="", file=sys.stderr, flush=True)


def run_answer(source: str) -> None:
    """Run the answer's code, and then each call of its functions that arrives at descriptor 1. Replies [outcome, result
    or exception, arguments after the call] as JSON; the outcome is broken if the code itself fails."""
    calls, sys.stdout = open(1, "rb", closefd=False), io.StringIO()  # noqa: SIM115
    namespace: dict[str, Any] = {"__name__": "answer"}
    try:
        exec(compile(source, "<answer>", "exec"), namespace)
        solution = namespace.get("Solution", object)  # LeetCode: the functions are methods
        for line in calls:
            name, args, kwargs = json.loads(line)
            if not hasattr(solution, name) and name not in namespace:
                raise NameError(f"the code does not define {name}")
            function = getattr(solution(), name) if hasattr(solution, name) else namespace[name]
            _send(_call_function(function, decode_value(args), decode_value(kwargs)))
    except BaseException as error:  # noqa: BLE001 an answer may raise anything
        _send(["broken", f"{type(error).__name__}: {str(error)[:MAX_TEXT]}", []])
        calls.read()  # the reply is lost if the connection closes before the tests read it


def _call_function(function: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[object]:
    """Call a function of the answer. Returns [outcome, result or exception, arguments after the call] as JSON data."""
    sys.stdout = io.StringIO()
    try:
        return ["returned", encode_value(function(*args, **kwargs), []), encode_value(args, [])]
    except Exception as error:  # noqa: BLE001 passed on to the test
        with contextlib.suppress(Exception):
            return ["raised", [type(error).__name__, str(error)[:MAX_TEXT]], encode_value(args, [])]
        return ["raised", ["Exception", ""], encode_value((), [])]
