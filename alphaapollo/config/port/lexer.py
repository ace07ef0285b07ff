"""A shell script cut into words and operators; quotes and `$` stay in the words as they were written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

OPERATORS = (";;", "&&", "||", ";", "&", "|", "(", ")")
REDIRECTION = re.compile(r"(\d*|&)(<<<|<<-?|>>|>&|<&|>\||<|>)")
ARRAY_START = re.compile(r"\w+\+?=\(")
CLOSING = {"(": ")", "{": "}"}


@dataclass(frozen=True)
class Token:
    """E.g. `Token("word", '"$HOME/data"', 7)`; a line's end is the operator `\\n`."""

    kind: Literal["word", "operator", "redirection"]
    text: str
    line: int


def tokens(source: str) -> Iterator[Token]:
    """The tokens of a script. Comments and here-documents leave; the target of a redirection is the word after it."""
    at, heredocs = 0, list[str]()
    while at < len(source):
        line = source.count("\n", 0, at) + 1
        if source.startswith("\\\n", at):
            at += 2
        elif source[at] == "\n":
            yield Token("operator", "\n", line)
            at = _after_heredocs(source, at + 1, heredocs)
            heredocs = []
        elif source[at].isspace():
            at += 1
        elif source[at] == "#":
            at = _line_end(source, at)
        elif source.startswith("((", at):
            end = skip(source, at)
            yield Token("word", source[at:end], line)
            at = end
        elif found := REDIRECTION.match(source, at):
            at = found.end()
            if found[2].startswith("<<") and found[2] != "<<<":
                end = _word_end(source, at := _past_blanks(source, at))
                heredocs.append(source[at:end].strip("'\"\\"))
                at = end
            else:
                yield Token("redirection", found[2], line)
        elif operator := next((sign for sign in OPERATORS if source.startswith(sign, at)), None):
            yield Token("operator", operator, line)
            at += len(operator)
        else:
            end = _word_end(source, at)
            yield Token("word", source[at:end], line)
            at = end


def skip(source: str, at: int) -> int:
    """The place after what opens at `at`: a quoted text, `$(...)`, `${...}`, `(...)`, a backtick, or one character."""
    sign = source[at]
    if sign == "\\":
        return at + 2
    if sign == "'":
        return _find(source, "'", at + 1)
    if sign in '"`':
        return _skip_until(source, at + 1, sign)
    if sign == "$" and source[at + 1 : at + 2] in CLOSING:
        return _skip_until(source, at + 2, CLOSING[source[at + 1]])
    if sign == "$" and source[at + 1 : at + 2] == "'":
        return _skip_until(source, at + 2, "'")
    if sign == "(":
        return _skip_until(source, at + 1, ")")
    return at + 1


def _skip_until(source: str, at: int, close: str) -> int:
    while at < len(source) and source[at] != close:
        if source[at] == "'" and close in ('"', "'"):
            at += 1  # within double quotes an apostrophe is a letter
        elif (close == "'" and source[at] != "\\") or (source[at] == "(" and close in ('"', "}")):
            at += 1
        elif source[at] == "#" and close == ")" and source[at - 1].isspace():
            at = _line_end(source, at)
        else:
            at = skip(source, at)
    return at + 1


def _word_end(source: str, at: int) -> int:
    start = at
    while at < len(source) and not source[at].isspace():
        if source[at] == "(" and ARRAY_START.fullmatch(source[start : at + 1]):
            return skip(source, at)
        if source[at] in ";&|()<>":
            break
        if source.startswith("\\\n", at):  # a line that goes on, with no blank before its end
            break
        at = skip(source, at)
    return min(max(at, start + 1), len(source))


def _past_blanks(source: str, at: int) -> int:
    while source[at : at + 1] in (" ", "\t"):
        at += 1
    return at


def _line_end(source: str, at: int) -> int:
    end = source.find("\n", at)
    return len(source) if end < 0 else end


def _find(source: str, sign: str, at: int) -> int:
    end = source.find(sign, at)
    return len(source) if end < 0 else end + 1


def _after_heredocs(source: str, at: int, delimiters: list[str]) -> int:
    for delimiter in delimiters:
        found = re.compile(rf"^\t*{re.escape(delimiter)}$", re.MULTILINE).search(source, at)
        at = found.end() if found else len(source)
    return at
