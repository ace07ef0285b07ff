"""Run snippets inside the sandboxed process. The program outside must not trust the results: a snippet can fake any
output and exit code."""

from __future__ import annotations

import ast
import atexit
import linecache
import sys
import threading
import traceback
from types import CodeType, ModuleType

EXIT_ERROR, EXIT_MEMORY = 1, 41
FILE_NAME = "<snippet>"


def make_namespace() -> dict[str, object]:
    """Create a `__main__` module, which dataclasses, pickle and type hints need, and return its namespace."""
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    return module.__dict__


def execute_snippet(source: bytes, namespace: dict[str, object], echo: bool) -> int:
    """Run one snippet. Return the exit code that Python would return, and print tracebacks to stderr. `echo`: whether
    to print the value of the last expression unless it is None, as the interactive interpreter does."""
    try:
        text = source.decode()
        linecache.cache[FILE_NAME] = (len(text), None, text.splitlines(keepends=True), FILE_NAME)
        statements, last = _compile_snippet(text, echo)
        exec(statements, namespace)
        if last is not None:
            value = eval(last, namespace)
            if value is not None:
                print(repr(value))
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return (stop.code or 0) & 0xFF
        print(stop.code, file=sys.stderr)
        return EXIT_ERROR
    except BaseException as error:  # noqa: BLE001  a snippet may raise anything
        return _print_exception(error)
    return 0


def shut_down_interpreter() -> None:
    """Do what Python does before it exits: wait for threads, call exit functions and flush the output."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    flush_output()


def flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()


def _compile_snippet(text: str, echo: bool) -> tuple[CodeType, CodeType | None]:
    """Return the code of all statements. With `echo`, a last expression is returned separately, to print its value."""
    tree = ast.parse(text, FILE_NAME)
    last = tree.body.pop() if echo and tree.body and isinstance(tree.body[-1], ast.Expr) else None
    statements = compile(tree, FILE_NAME, "exec", dont_inherit=True)
    if not isinstance(last, ast.Expr):
        return statements, None
    return statements, compile(ast.Expression(last.value), FILE_NAME, "eval", dont_inherit=True)


def _print_exception(error: BaseException) -> int:
    """Print the traceback without frames outside the snippet. Returns the exit code."""
    is_in_snippet = any(frame.f_code.co_filename == FILE_NAME for frame, _ in traceback.walk_tb(error.__traceback__))
    is_decoding_error = isinstance(error, SyntaxError | UnicodeError) and not is_in_snippet
    trace = None if is_decoding_error else error.__traceback__ and error.__traceback__.tb_next
    code = EXIT_MEMORY if isinstance(error, MemoryError) else EXIT_ERROR
    traceback.print_exception(type(error), error, trace)
    return code
