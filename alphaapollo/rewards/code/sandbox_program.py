"""Programs that run inside the sandbox to test code. This file is sent there as text, so it has no dependencies.

The two programs run in separate processes, so that an answer can neither read nor change its tests:

    run_tests    runs the tests with stubs for the answer's functions; prints the calls to the stubs, or the verdict
    run_answer   runs the answer and a list of calls to its functions; prints the result or exception of each call

In the first run of the tests, no results are known. Each stub returns an `UnknownCallResult`, which supports every
operation, and asserts are skipped, so one run finds nearly all calls. Calls whose arguments depend on results are found
in later runs.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import io
import itertools
import json
import math
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

MAX_CALLS = 20_000  # calls per run of the tests
MAX_DEPTH = 10  # depth of calls whose arguments depend on results
MAX_ITEMS = 100_000  # items read from an iterator
MAX_TEXT = 500  # characters of an error message
TOLERANCE = 1e-6  # relative and absolute tolerance of a result that is expected to be a float


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
    if kind is UnknownCallResult:
        non_json.append(value)
        return ["unknown", value._depth]
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
    kinds: dict[str, Callable[..., object]] = {
        "int": lambda text: int(text, 16),
        "float": lambda text: float(text) if text in ("inf", "-inf", "nan") else float.fromhex(text),
        "list": lambda items: list(map(decode_value, items)),
        "tuple": lambda items: tuple(map(decode_value, items)),
        "set": lambda items: set(map(decode_value, items)),
        "frozenset": lambda items: frozenset(map(decode_value, items)),
        "iterator": lambda items: iter(list(map(decode_value, items))),
        "dict": lambda pairs: {decode_value(key): decode_value(item) for key, item in pairs},
        "complex": complex,
        "bytes": bytes.fromhex,
        "range": range,
        "opaque": NonJsonResult,
    }
    return kinds[kind](*parts)


class UnknownCallResult:
    """Placeholder for the result of a call that was not executed yet. It equals every value, and acts as a number and
    as a collection.

    `_depth` is the depth of nested calls, e.g. 2 for f(f(1)). A value computed from several placeholders has the
    largest depth.
    """

    def __init__(self, call_depth: int):
        self._depth = call_depth

    def __getattr__(self, name: str) -> UnknownCallResult:
        return self

    def __call__(self, *args: object, **kwargs: object) -> UnknownCallResult:
        return _select_deepest_unknown_result(self, *args)

    def __iter__(self) -> Iterator[object]:
        return iter(())


def _select_deepest_unknown_result(*operands: object) -> UnknownCallResult:
    """Return the UnknownCallResult with the largest depth among the operands of an operator."""
    return max((value for value in operands if type(value) is UnknownCallResult), key=lambda value: value._depth)


OPERATORS = """add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow neg abs round and or xor
    getitem setitem delitem enter"""
for _name in OPERATORS.split():
    setattr(UnknownCallResult, f"__{_name}__", _select_deepest_unknown_result)
for _name, _value in {"eq": True, "ne": False, "lt": True, "le": True, "gt": True, "ge": True, "bool": True,
                      "contains": True, "len": 0, "hash": 0, "int": 0, "float": 0.0, "index": 0, "complex": 0j,
                      "str": "", "repr": "", "format": "", "exit": None}.items():  # fmt: skip
    setattr(UnknownCallResult, f"__{_name}__", lambda *operands, value=_value: value)


class CallLimitExceeded(BaseException):
    """Error for tests that call the answer's functions too often (MAX_CALLS) or nest calls too deeply (MAX_DEPTH)."""


class CallRecorder:
    """Recorder of the tests' calls to the answer's functions. A call with a known result returns that result."""

    def __init__(self, known_results: list[list[Any]]):
        self.calls: list[object] = []
        self.unknown = 0
        self._known: dict[str, list[Any]] = {}
        for call, result in known_results:
            self._known.setdefault(json.dumps(call), []).append(result)

    def make_stub(self, name: str) -> Callable[..., object]:
        """Return a function that replaces the answer's function of this name in the tests."""

        def stub(*args: object, **kwargs: object) -> object:
            return self._record_call(name, args, kwargs)

        stub.__name__ = name
        return stub

    def _record_call(self, name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        if len(self.calls) >= MAX_CALLS:
            raise CallLimitExceeded(f"the tests make more than {MAX_CALLS} calls to the answer's functions; use fewer")
        non_json: list[object] = []
        encoded = [name, encode_value(args, non_json), encode_value(kwargs, non_json)]
        depth = max((value._depth for value in non_json if type(value) is UnknownCallResult), default=0)
        if depth >= MAX_DEPTH:
            raise CallLimitExceeded(f"the tests nest more than {MAX_DEPTH} calls to the answer's functions")
        if depth:
            self.unknown += 1
            return UnknownCallResult(depth + 1)
        if non_json:
            raise ArgumentError(f"the tests call {name} with an argument that is not plain data (numbers, text, lists)")
        self.calls.append(encoded)
        results = self._known.get(json.dumps(encoded))
        if not results:
            self.unknown += 1
            return UnknownCallResult(1)
        outcome, value, args_after = results.pop(0)
        for arg, content in zip(args, decode_value(args_after), strict=True):
            _replace_content(arg, content)
        if outcome == "returned":
            return decode_value(value)
        kind = getattr(builtins, value[0], Exception)
        raise (kind if isinstance(kind, type) and issubclass(kind, Exception) else Exception)(value[1])


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
    return type(result) is UnknownCallResult or any(_is_equal(result, one) for one in accepted)


def _is_equal(one: object, other: object) -> bool:
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        one, other = ({str(key): value for key, value in items.items()} for items in (one, other))
        return one.keys() == other.keys() and all(_is_equal(one[key], other[key]) for key in one)
    if isinstance(other, float) and isinstance(one, int | float):
        return one == other or math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return one == other


class _AssertRemover(ast.NodeTransformer):
    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        return ast.copy_location(ast.Expr(node.test), node)


def _run_tests_once(request: dict[str, Any], recorder: CallRecorder, with_asserts: bool) -> str:
    """Run the tests. Returns the exception of a failing test; empty if all pass. Raises if the tests are broken."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    tree = ast.parse(request["tests"])
    if not with_asserts:
        tree = ast.fix_missing_locations(_AssertRemover().visit(tree))
    program = compile(tree, "<tests>", "exec")
    namespace: dict[str, Any] = {"__name__": "tests", "is_same_result": is_same_result}
    try:
        exec(request["setup"], namespace)
    except IndentationError:  # it ends with the first line of a function, which the answer continues
        exec(request["setup"] + "\n    pass", namespace)
    namespace.update({name: recorder.make_stub(name) for name in request["names"]})
    if "Solution" in request["names"]:
        namespace["Solution"] = type("Solution", (), {"__getattr__": lambda _, name: recorder.make_stub(name)})
    check = request["check"]
    try:
        exec(program, namespace)
        if check:
            namespace["check"](namespace[check])
    except (ArgumentError, SyntaxError, ImportError, CallLimitExceeded):
        raise
    except BaseException as error:  # noqa: BLE001 any exception fails the test
        return f"{type(error).__name__}: {str(error)[:MAX_TEXT]}"
    return ""


def run_tests() -> None:
    """Read {tests, setup, names, check, known} as JSON from stdin and run the tests. Print {calls} if `known`
    lacks the result of a call, else {passed, failure}; {broken} if the tests themselves are broken."""
    request = json.load(sys.stdin)
    out, sys.stdout = sys.stdout, io.StringIO()
    try:
        recorder = CallRecorder(request["known"])
        _run_tests_once(request, recorder, with_asserts=False)
        if recorder.unknown:
            reply: dict[str, object] = {"calls": recorder.calls}
        else:
            failure = _run_tests_once(request, CallRecorder(request["known"]), with_asserts=True)
            reply = {"passed": not failure, "failure": failure}
    except BaseException as error:  # noqa: BLE001 reported by the grader
        reply = {"broken": f"{type(error).__name__}: {str(error)[:MAX_TEXT]}"}
    out.write("\n" + json.dumps(reply))


def run_answer(source: str) -> None:
    """Run the answer's code, and then the calls to its functions that stdin lists as JSON. Print the list of their
    results (see _call_function) as JSON, or {"broken": error message} if the code itself fails."""
    calls = json.load(sys.stdin)
    out, sys.stdout = sys.stdout, io.StringIO()
    namespace: dict[str, Any] = {"__name__": "answer"}
    try:
        exec(compile(source, "<answer>", "exec"), namespace)
        solution = namespace.get("Solution", object)  # LeetCode: the functions are methods
        names = {name for name, _, _ in calls}
        if missing := sorted(name for name in names - namespace.keys() if not hasattr(solution, name)):
            raise NameError(f"the code does not define {', '.join(missing)}")
        reply: object = [
            _call_function(
                getattr(solution(), name) if hasattr(solution, name) else namespace[name],
                decode_value(args),
                decode_value(kwargs),
            )
            for name, args, kwargs in calls
        ]
    except BaseException as error:  # noqa: BLE001 an answer may raise anything
        reply = {"broken": f"{type(error).__name__}: {str(error)[:MAX_TEXT]}"}
    out.write("\n" + json.dumps(reply))


def _call_function(function: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[object]:
    """Call a function of the answer. Returns [outcome, result or exception, arguments after the call] as JSON data."""
    sys.stdout = io.StringIO()
    try:
        return ["returned", encode_value(function(*args, **kwargs), []), encode_value(args, [])]
    except Exception as error:  # noqa: BLE001 passed on to the test
        with contextlib.suppress(Exception):
            return ["raised", [type(error).__name__, str(error)[:MAX_TEXT]], encode_value(args, [])]
        return ["raised", ["Exception", ""], encode_value((), [])]
