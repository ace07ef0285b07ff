"""What a shell script would run: its commands with variables, arrays and branches worked out. Nothing is ever run.

A command that is not the shell's own counts as done, and as failed within `$( )` or a condition, so that probes for
other hardware (`$(python3 -c 'import torch_npu' && echo npu || echo gpu)`) choose what they choose without it.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from alphaapollo.config.port.expansion import (
    Scope,
    arithmetic,
    array_of,
    expand,
    is_known,
    known_part,
    text_of,
    unknown,
)
from alphaapollo.config.port.grammar import Branches, Cases, Function, Loop, Node, Sequential, Simple, parse

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
DECLARATIONS = ("export", "declare", "local", "readonly", "typeset")
SILENT = ("set", "shopt", ":", "true", "shift", "exit", "return", "unset", "trap", "source", ".", "cd", "eval")


@dataclass(frozen=True)
class Command:
    """E.g. `Command(["python3", "-m", "verl.trainer.main_ppo", "trainer.nnodes=1"], line=7)`."""

    words: list[str]
    line: int


@dataclass
class Reader:
    """Walks through a script; `commands` and `notes` are what it found."""

    scope: Scope
    probing: bool = False  # within `$( )` or a condition: a command that cannot be run counts as failed
    commands: list[Command] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    functions: dict[str, Node] = field(default_factory=dict)
    output: list[str] | None = None
    folder: str | None = None  # where a `cd` went, within `$( )`

    def walk(self, node: Node | None) -> bool:
        """Go through a node as the shell would; was it a success?"""
        match node:
            case Simple():
                return self._simple(node)
            case Sequential():
                return self._sequence(node)
            case Branches():
                for condition, body in node.branches:
                    if self._condition(condition):
                        return self.walk(body)
                return self.walk(node.otherwise)
            case Cases():
                subject = text_of(node.subject, self.scope)
                for patterns, body in node.cases:
                    if any(fnmatchcase(subject, text_of(pattern, self.scope)) for pattern in patterns):
                        return self.walk(body)
            case Loop():
                self._loop(node)
            case Function():
                self.functions[node.name] = node.body
        return True

    def _sequence(self, node: Sequential) -> bool:
        success = True
        for sign, part in node.parts:
            if sign == "!":
                success = not self.walk(part)
            elif sign not in ("&&", "||") or success == (sign == "&&"):
                success = self.walk(part)
        return success

    def _condition(self, node: Node) -> bool:
        before, self.probing = self.probing, True
        success = self.walk(node)
        self.probing = before
        return success

    def _loop(self, node: Loop) -> None:
        if node.name is None:
            self.notes.append(f"line {node.line}: a while loop was not followed")
            return
        for item in [text for word in node.items for text in expand(word, self.scope)]:
            self.scope.variables[node.name] = item
            self.walk(node.body)

    def _simple(self, node: Simple) -> bool:
        words = list(node.words)
        while words and (found := ASSIGNMENT.fullmatch(words[0])):
            self._assign(found)
            words.pop(0)
        if not words:
            return True
        if words[0] in DECLARATIONS:
            for word in words[1:]:
                if found := ASSIGNMENT.fullmatch(word):
                    self._assign(found)
            return True
        if words[0].startswith("(("):
            return bool(arithmetic(words[0][1:-1], self.scope))
        if words[0] in ("[", "[[", "test"):
            return self._tested([text_of(word, self.scope) for word in words[1:]], node)
        return self._command([text for word in words for text in expand(word, self.scope)], node.line)

    def _assign(self, found: re.Match[str]) -> None:
        name, adds, raw = found.groups()
        if name in self.scope.fixed:
            return
        before = self.scope.variables.get(name)
        if raw.startswith("("):
            added = array_of(raw, self.scope)
            self.scope.variables[name] = [*before, *added] if adds and isinstance(before, list) else added
        else:
            text = text_of(raw, self.scope)
            self.scope.variables[name] = before + text if adds and isinstance(before, str) else text

    def _tested(self, words: list[str], node: Simple) -> bool:
        words = [word for word in words if word not in ("]", "]]")]
        for sign, combine in (("||", any), ("-o", any), ("&&", all), ("-a", all)):
            if sign in words:
                at = words.index(sign)
                return combine([self._tested(words[:at], node), self._tested(words[at + 1 :], node)])
        result = tested(words)
        if result is None:
            self.notes.append(f"line {node.line}: cannot tell whether `{' '.join(node.words)}`; taken as false")
        return bool(result)

    def _command(self, words: list[str], line: int) -> bool:
        if not words:
            return True
        name, arguments = words[0], words[1:]
        if name in self.functions:
            before, self.scope.positional = self.scope.positional, arguments
            self.walk(self.functions[name])
            self.scope.positional = before
            return True
        if self.output is not None and name in ("echo", "printf", "basename", "dirname", "pwd", "cd"):
            return self._said(name, arguments)
        if name in SILENT or name in ("echo", "printf"):
            return True
        self.commands.append(Command(words, line))
        return not self.probing

    def _said(self, name: str, arguments: list[str]) -> bool:
        assert self.output is not None
        words = [word for word in arguments if not word.startswith("-")]
        if name == "cd":
            self.folder = posixpath.normpath(words[0]) if words else None
        elif name == "pwd":
            self.output += [self.folder] if self.folder is not None else []
        elif name in ("basename", "dirname") and words:
            text = getattr(posixpath, name)(words[0].rstrip("/")) or "."
            self.output.append(text.removesuffix(words[1]) if len(words) > 1 else text)
        else:
            self.output.append(" ".join(words))
        return True


def read_script(source: str, variables: dict[str, str] | None = None, path: str = "") -> Reader:
    """The commands that the script runs if its environment sets only `variables`, which its own lines do not change."""
    scope = Scope(answer=lambda command: _answer(command, reader))
    scope.variables = {**({"BASH_SOURCE": [path], "0": path} if path else {}), **(variables or {})}
    scope.fixed = frozenset(variables or {})
    reader = Reader(scope)
    reader.walk(parse(source))
    return reader


def _answer(command: str, reader: Reader) -> str | None:
    inner = Reader(reader.scope, probing=True, output=[], functions=reader.functions)
    inner.walk(parse(command))
    if inner.output:
        return "\n".join(inner.output)
    body = reader.functions.get(command.strip())
    if isinstance(body, Sequential) and len(body.parts) == 1 and isinstance(body.parts[0][1], Simple):
        return unknown(f"$({' '.join(body.parts[0][1].words)})")  # what the script's own function would run
    return None


def tested(words: Sequence[str]) -> bool | None:
    """What `[ ... ]` says; None = that cannot be known here."""
    if words and words[0] == "!":
        inner = tested(words[1:])
        return None if inner is None else not inner
    if len(words) == 2 and words[0] in ("-n", "-z"):
        known = known_part(words[1])
        return None if "$(" in words[1] and not known else bool(known) == (words[0] == "-n")
    if len(words) == 1:
        return bool(known_part(words[0]))
    if len(words) != 3 or not all(map(is_known, words)):
        return None
    left, sign, right = words
    if sign in ("=", "==", "!="):
        return fnmatchcase(left, right) == (sign != "!=")
    numbers = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}
    if sign in numbers:
        number = arithmetic(f"({left} {numbers[sign]} {right})", Scope(answer=lambda _: None))
        return None if number is None else bool(number)
    return None
