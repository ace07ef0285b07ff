"""Count the work of functions that read a text: characters read by string methods and patterns, and lines of Python."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any

METHODS = (  # noqa: SIM905
    "__getitem__ casefold count encode lower lstrip partition removeprefix replace rpartition rsplit rstrip split "
    "splitlines strip swapcase title translate upper"
).split()


class WorkCounter:
    """Counter of the work of functions in `modules`, and of the longest text that each of their patterns has read."""

    def __init__(self, modules: Iterable[ModuleType]):
        self.work = 0
        self.longest: dict[tuple[re.Pattern[str], bool], int] = {}  # (pattern, only at the start) -> characters
        self._modules = list(modules)
        self._files = {module.__file__ for module in self._modules}
        self._text_class = make_counted_text_class(self)

    @contextmanager
    def count_patterns(self) -> Iterator[None]:
        """Context manager that replaces the patterns of the modules by ones that count."""
        replaced = [
            (module, name, value)
            for module in self._modules
            for name, value in vars(module).items()
            if isinstance(value, re.Pattern)
        ]
        for module, name, value in replaced:
            setattr(module, name, CountedPattern(value, self))
        try:
            yield
        finally:
            for module, name, value in replaced:
                setattr(module, name, value)

    def measure(self, function: Callable[[str], object], text: str) -> int:
        """Return the work of `function(text)`."""
        self.work = 0
        traced = sys.gettrace()
        sys.settrace(self._trace_call)
        try:
            function(self._text_class(text))
        finally:
            sys.settrace(traced)
        return self.work

    def wrap(self, value: Any) -> Any:
        """Return a text, or a list or tuple of texts, that counts the work of its methods."""
        if isinstance(value, list | tuple):
            return type(value)(map(self.wrap, value))
        return self._text_class(value) if type(value) is str else value

    def add(self, characters: int) -> None:
        self.work += 1 + characters

    def _trace_call(self, frame: FrameType, event: str, argument: object) -> Any:
        return self._trace_line if frame.f_code.co_filename in self._files else None

    def _trace_line(self, frame: FrameType, event: str, argument: object) -> Any:
        self.work += event == "line"
        return self._trace_line


class CountedPattern:
    """Pattern that counts the characters of each text that it reads. That its steps are linear is another test."""

    def __init__(self, pattern: re.Pattern[str], counter: WorkCounter):
        self._pattern, self._counter = pattern, counter

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._pattern, name)
        if not callable(method):
            return method

        def call(*args: Any) -> Any:
            text, *positions = args[1:] if name in ("sub", "subn") else args
            end = min([*positions[1:2], len(text)])
            result = method(*args)
            found = result if isinstance(result, re.Match) else None
            start = positions[0] if positions and name in ("match", "search") else 0
            read = (found.end() if found and name != "fullmatch" else end) - start
            self._counter.add(read)
            longest, key = self._counter.longest, (self._pattern, name in ("match", "fullmatch"))
            longest[key] = max(longest.get(key, 0), end - start)
            return self._counter.wrap(result)

        return call


def make_counted_text_class(counter: WorkCounter) -> type[str]:
    """Return a subclass of str. Its methods count the characters that they read, and return texts that count."""

    def make_method(name: str) -> Callable[..., Any]:
        def method(self: str, *args: Any) -> Any:
            result = getattr(str, name)(self, *args)
            counter.add(len(result) if name == "__getitem__" else len(self))
            return counter.wrap(result)

        return method

    def find(self: str, part: str, start: int = 0) -> int:
        found = str.find(self, part, start)
        counter.add((len(self) if found < 0 else found) - start)
        return found

    def rfind(self: str, part: str, *span: int) -> int:
        found = str.rfind(self, part, *span)
        counter.add(len(self) - found)
        return found

    def contains(self: str, part: str) -> bool:
        return find(self, part) >= 0

    methods = {name: make_method(name) for name in METHODS}
    return type("CountedText", (str,), {**methods, "find": find, "rfind": rfind, "__contains__": contains})
