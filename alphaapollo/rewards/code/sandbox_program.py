"""What runs inside the sandbox to test code. This file's text is sent there, so it imports the standard library only.

Two programs that never meet in one process, so that an answer can neither read nor touch what it is tested with:

    run_tests: the tests, with stand-ins for the answer's functions -> the calls they make, or the verdict
    run_answer: the answer, with a list of calls                    -> what each returned or raised

The first run of the tests knows no results: a call returns `Unknown`, which suits everything, and asserts are left out,
so that one run finds nearly all calls. Calls whose arguments come from results need another round.
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

MAX_CALLS = 20_000  # of one run of the tests
MAX_DEPTH = 10  # of calls whose arguments come from results
MAX_ITEMS = 100_000  # taken from an iterator
MAX_TEXT = 500  # characters of an error's message


class Opaque:
    """A result that cannot leave its process: equal to nothing."""

    def __init__(self, text: str):
        self.text = text

    def __repr__(self) -> str:
        return self.text


class Unpassable(TypeError):
    """An argument that cannot be sent to the answer."""


def encode(value: Any) -> Any:
    """Plain data as JSON; anything else as Opaque."""
    kind = type(value)
    if kind is Unknown:
        return ["unknown", value._depth]
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return ["int", hex(value)]
    if kind is float:
        return ["float", value.hex() if math.isfinite(value) else repr(value)]
    if kind in (list, tuple, set, frozenset):
        return [kind.__name__, [encode(item) for item in value]]
    if isinstance(value, dict):
        return ["dict", [[encode(key), encode(item)] for key, item in value.items()]]
    if kind is complex:
        return ["complex", value.real, value.imag]
    if kind is bytes:
        return ["bytes", value.hex()]
    if kind is range:
        return ["range", value.start, value.stop, value.step]
    if kind.__module__ == "numpy":
        return encode(value.tolist())
    if isinstance(value, Iterator):
        return ["iterator", [encode(item) for item in itertools.islice(value, MAX_ITEMS)]]
    return ["opaque", repr(value)[:MAX_TEXT]]


def decode(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    kind, *parts = value
    collections: dict[str, Callable[[Any], Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
    if kind in collections or kind == "iterator":
        items = [decode(item) for item in parts[0]]
        return iter(items) if kind == "iterator" else collections[kind](items)
    others: dict[str, Callable[..., Any]] = {
        "int": lambda text: int(text, 16),
        "float": lambda text: float(text) if text in ("inf", "-inf", "nan") else float.fromhex(text),
        "dict": lambda pairs: {decode(key): decode(item) for key, item in pairs},
        "complex": complex,
        "bytes": bytes.fromhex,
        "range": range,
        "opaque": Opaque,
    }
    return others[kind](*parts)


def nodes(encoded: Any) -> Iterator[list[Any]]:
    """Everything in what `encode` made that has a kind: [kind, ...]."""
    if not isinstance(encoded, list):
        return
    yield encoded
    kind, *parts = encoded
    if kind in ("list", "tuple", "set", "frozenset", "iterator"):
        inner = parts[0]
    else:
        inner = [item for pair in parts[0] for item in pair] if kind == "dict" else []
    for item in inner:
        yield from nodes(item)


class Unknown:
    """A result that is not known yet: equal to everything, true, a number, an empty collection.

    `_depth`: so many calls deep, 2 for f(f(1)); of what it is computed from others the deepest.
    """

    def __init__(self, depth: int):
        self._depth = depth

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _deepest(self, *args)

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def _deepest(*values: Any) -> Any:
    return max((value for value in values if type(value) is Unknown), key=lambda value: value._depth)


def _suit(name: str, value: Any) -> None:
    setattr(Unknown, f"__{name}__", lambda *values: _deepest(*values) if value is Unknown else value)


OPERATORS = """add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow neg abs round and or xor
    getitem setitem delitem enter"""
for _name in OPERATORS.split():
    _suit(_name, Unknown)
for _name, _value in {"eq": True, "ne": False, "lt": True, "le": True, "gt": True, "ge": True, "bool": True,
                      "contains": True, "len": 0, "hash": 0, "int": 0, "float": 0.0, "index": 0, "complex": 0j,
                      "str": "", "repr": "", "format": "", "exit": None}.items():  # fmt: skip
    _suit(_name, _value)


class TooMuch(BaseException):
    """More than MAX_CALLS calls, or more than MAX_DEPTH deep."""


class Calls:
    """The calls that tests make: answered from what is known, else written down."""

    def __init__(self, known: list[list[Any]]):
        self.asked: list[Any] = []
        self.unknown = 0
        self._known: dict[str, list[Any]] = {}
        for call, result in known:
            self._known.setdefault(json.dumps(call), []).append(result)

    def stand_in(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._call(name, args, kwargs)

        call.__name__ = name
        return call

    def _call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(self.asked) >= MAX_CALLS:
            raise TooMuch(f"more than {MAX_CALLS} calls")
        asked = [name, encode(args), encode(kwargs)]
        key = json.dumps(asked)
        found = [*nodes(asked[1]), *nodes(asked[2])] if '["unknown", ' in key or '["opaque", ' in key else []
        depth = max((node[1] for node in found if node[0] == "unknown"), default=0)
        if depth >= MAX_DEPTH:
            raise TooMuch(f"their calls depend on results more than {MAX_DEPTH} deep")
        if depth:
            self.unknown += 1
            return Unknown(depth + 1)
        if any(node[0] == "opaque" for node in found):
            raise Unpassable(f"the tests call {name} with what is no plain data")
        self.asked.append(asked)
        results = self._known.get(key)
        if not results:
            self.unknown += 1
            return Unknown(1)
        ending, value, args_after = results.pop(0)
        for arg, after in zip(args, decode(args_after), strict=True):
            _become(arg, after)
        if ending == "returned":
            return decode(value)
        kind = getattr(builtins, value[0], Exception)
        raise (kind if isinstance(kind, type) and issubclass(kind, Exception) else Exception)(value[1])


def _become(arg: Any, after: Any) -> None:
    """What the answer did to a list, dict or set that it was given."""
    if isinstance(arg, list):
        arg[:] = after
    elif isinstance(arg, dict | set):
        arg.clear()
        arg.update(after)


class _WithoutAsserts(ast.NodeTransformer):
    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        return ast.copy_location(ast.Expr(node.test), node)


def _play(request: dict[str, Any], calls: Calls, asserts: bool) -> str:
    """Run the tests once: "" if they pass, else how they fail. Raises what says that they are broken."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    tree = ast.parse(request["tests"])
    program = compile(tree if asserts else ast.fix_missing_locations(_WithoutAsserts().visit(tree)), "<tests>", "exec")
    namespace: dict[str, Any] = {"__name__": "tests"}
    exec(request["setup"], namespace)
    namespace.update({name: calls.stand_in(name) for name in request["names"]})
    check = request["check"]
    try:
        exec(program, namespace)
        if check:
            namespace["check"](namespace[check])
    except (Unpassable, SyntaxError, ImportError, TooMuch):
        raise
    except BaseException as error:  # noqa: BLE001 a test fails by whatever it raises
        return f"{type(error).__name__}: {str(error)[:MAX_TEXT]}"
    return ""


def run_tests() -> None:
    """stdin: {tests, setup, names, check, known: [[call, result]]}; prints {calls} or {passed, why} or {broken}."""
    request = json.load(sys.stdin)
    out, sys.stdout = sys.stdout, io.StringIO()
    try:
        calls = Calls(request["known"])
        _play(request, calls, asserts=False)
        if calls.unknown:
            reply: dict[str, Any] = {"calls": calls.asked}
        else:
            why = _play(request, Calls(request["known"]), asserts=True)
            reply = {"passed": not why, "why": why}
    except BaseException as error:  # noqa: BLE001 said outside
        reply = {"broken": f"{type(error).__name__}: {str(error)[:MAX_TEXT]}"}
    out.write("\n" + json.dumps(reply))


def run_answer(source: str) -> None:
    """stdin: a list of calls; prints a list of [ending, value, arguments after the call], or {broken}."""
    calls = json.load(sys.stdin)
    out, sys.stdout = sys.stdout, io.StringIO()
    namespace: dict[str, Any] = {"__name__": "answer"}
    try:
        exec(compile(source, "<answer>", "exec"), namespace)
        if missing := sorted({name for name, _, _ in calls} - namespace.keys()):
            raise NameError(f"the code defines no {', '.join(missing)}")
        reply: Any = [_answer(namespace[name], decode(args), decode(kwargs)) for name, args, kwargs in calls]
    except BaseException as error:  # noqa: BLE001 an answer may raise anything
        reply = {"broken": f"{type(error).__name__}: {str(error)[:MAX_TEXT]}"}
    out.write("\n" + json.dumps(reply))


def _answer(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    sys.stdout = io.StringIO()
    try:
        return ["returned", encode(function(*args, **kwargs)), encode(args)]
    except Exception as error:  # noqa: BLE001 passed on to the test
        with contextlib.suppress(Exception):
            return ["raised", [type(error).__name__, str(error)[:MAX_TEXT]], encode(args)]
        return ["raised", ["Exception", ""], encode(())]
