"""Count the steps of Python's regular expressions.

`re` does not count its steps, so this module searches in the same order as `re`: a backtracking search over the parse
tree of the pattern. Single characters and positions are tested by `re`. Each test of a position is a step, and a
repetition of single characters takes as many steps as it has characters.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from re import _compiler, _parser  # type: ignore[attr-defined]
from re._constants import (  # type: ignore[import-not-found]
    ANY,
    ASSERT,
    ASSERT_NOT,
    AT,
    ATOMIC_GROUP,
    BRANCH,
    IN,
    LITERAL,
    MAX_REPEAT,
    MAXREPEAT,
    MIN_REPEAT,
    NOT_LITERAL,
    POSSESSIVE_REPEAT,
    SUBPATTERN,
)  # fmt: skip
from typing import Any

Ends = Callable[[int], Iterator[int]]  # start of a match -> possible ends, in the order in which `re` tries them
SINGLE, REPEATS = (LITERAL, NOT_LITERAL, ANY, IN), (MAX_REPEAT, MIN_REPEAT, POSSESSIVE_REPEAT)


def count_steps(pattern: re.Pattern[str], text: str, only_at_start: bool = False, limit: float = math.inf) -> int:
    """Return the number of steps of `pattern.findall(text)`, or of `pattern.match(text)` with `only_at_start`. Above
    `limit`, stop and return the steps until then."""
    matcher = Matcher(pattern, text, limit)
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 10 * len(text)))  # repeated groups are nested generators
    position = 0
    if only_at_start:
        matcher.find_end(0)
        return matcher.steps
    while position <= len(text) and matcher.steps <= limit:
        end = matcher.find_end(position)
        position = position + 1 if end is None else max(end, position + 1)
    return matcher.steps


class Matcher:
    """Search of a pattern in a text that counts its steps."""

    def __init__(self, pattern: re.Pattern[str], text: str, limit: float = math.inf):
        self.steps, self._text, self._limit = 0, text, limit
        tree = _parser.parse(pattern.pattern, pattern.flags)
        self._state = tree.state
        self._ends = self._read_sequence(tree, pattern.flags)

    def find_end(self, start: int) -> int | None:
        """Return the end of the match that starts at `start`; None if no match starts there."""
        return next(self._ends(start), None)

    def _compile(self, node: Any, flags: int) -> re.Pattern[str]:
        return _compiler.compile(_parser.SubPattern(self._state, [node]), flags)  # type: ignore[no-any-return]

    def _read_sequence(self, nodes: Any, flags: int) -> Ends:
        parts = [self._read_node(*node, flags) for node in nodes]

        def find_ends(start: int, index: int = 0) -> Iterator[int]:
            if index == len(parts):
                yield start
                return
            for end in parts[index](start):
                yield from find_ends(end, index + 1)

        return find_ends

    def _read_node(self, kind: Any, value: Any, flags: int) -> Ends:
        if kind is BRANCH:
            choices = [self._read_sequence(one, flags) for one in value[1]]
            return lambda start: chain.from_iterable(one(start) for one in choices)
        if kind is SUBPATTERN:
            return self._read_sequence(value[3], (flags | value[1]) & ~value[2])
        if kind is ATOMIC_GROUP:
            inner = self._read_sequence(value, flags)
            return lambda start: self._first(inner(start))
        if kind in REPEATS:
            return self._read_repeat(kind, *value, flags)
        if kind in (ASSERT, ASSERT_NOT) and value[0] > 0:
            inner = self._read_sequence(value[1], flags)
            return lambda start: iter([start] * (any(True for _ in inner(start)) is (kind is ASSERT)))
        assert kind in (*SINGLE, AT, ASSERT, ASSERT_NOT), kind
        test = self._compile((kind, value), flags)

        def find_ends(start: int) -> Iterator[int]:
            self.steps += 1
            if found := test.match(self._text, start):
                yield found.end()

        return find_ends

    def _first(self, ends: Iterator[int]) -> Iterator[int]:
        for end in ends:
            yield end
            return

    def _read_repeat(self, kind: Any, least: int, most: int, nodes: Any, flags: int) -> Ends:
        if len(nodes) == 1 and nodes[0][0] in SINGLE:
            run = self._compile((MAX_REPEAT, (0, most, nodes)), flags)

            def find_run_ends(start: int) -> Iterator[int]:
                found = run.match(self._text, start)
                assert found
                counts = range(least, found.end() - start + 1)
                self.steps += 1 if kind is MIN_REPEAT else 1 + len(counts)
                for count in counts if kind is MIN_REPEAT else reversed(counts):
                    self.steps += 1
                    if self.steps > self._limit:
                        return
                    yield start + count
                    if kind is POSSESSIVE_REPEAT:
                        return

            return find_run_ends
        inner = self._read_sequence(nodes, flags)

        def find_ends(start: int, count: int = 0) -> Iterator[int]:
            if kind is MIN_REPEAT and count >= least:
                yield start
            if most == MAXREPEAT or count < most:
                for end in inner(start):
                    if end > start or count < least:
                        yield from find_ends(end, count + 1)
            if kind is not MIN_REPEAT and count >= least:
                yield start

        return find_ends if kind is not POSSESSIVE_REPEAT else lambda start: self._first(find_ends(start))
