"""What the shell makes of a word: variables, arrays, arithmetic. What cannot be known stays as it was written.

The unknown parts stand between two NUL characters, so that they can be told from text and go into our command as they
are: `$HOME/data` without a value for HOME is `\\0$HOME\\0/data`.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from alphaapollo.config.port.lexer import skip, tokens

MARK = "\0"
PARAMETER = re.compile(r"(?P<length>#?)(?P<name>\w+|[@*#?])(?:\[(?P<index>[^]]*)\])?(?P<rest>.*)", re.DOTALL)
DEFAULT = re.compile(r"(:?[-=+?])(.*)", re.DOTALL)
TRIM = re.compile(r"(##|#|%%|%)(.*)", re.DOTALL)
REPLACE = re.compile(r"(//?)((?:\\.|[^/])*)/?(.*)", re.DOTALL)
ARITHMETIC: dict[type[ast.AST], Callable[..., int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}

Value = str | list[str]


@dataclass
class Scope:
    """What the script has set so far, and who answers `$(command)`: text, or None where it is not known."""

    answer: Callable[[str], str | None]
    variables: dict[str, Value] = field(default_factory=dict)
    fixed: frozenset[str] = frozenset()  # given from outside; assignments leave them alone
    positional: list[str] | None = None  # None: what the script itself was called with, which nobody knows


def unknown(text: str) -> str:
    """A part that cannot be known, as it was written."""
    return f"{MARK}{text}{MARK}"


def is_known(text: str) -> bool:
    return MARK not in text


def known_part(text: str) -> str:
    """The text without its unknown parts, as a shell sees variables that nobody has set."""
    return "".join(text.split(MARK)[::2])


def expand(word: str, scope: Scope) -> list[str]:
    """The fields that a word becomes: one as a rule, more for `"${ARRAY[@]}"` and unquoted blanks, none for nothing."""
    fields: list[str] = []
    goes_on = False  # does what comes next belong to the last field?
    for part, quoted in _parts(word, scope):
        whole = quoted or isinstance(part, list)
        pieces = part if isinstance(part, list) else [part] if quoted else _split(part)
        for number, piece in enumerate(pieces):
            if goes_on and number == 0 and (whole or not part[0].isspace()):
                fields[-1] += piece
            else:
                fields.append(piece)
            goes_on = True
        if not whole and part and part[-1].isspace():
            goes_on = False
    return fields


def text_of(word: str, scope: Scope) -> str:
    """A word as one text."""
    return " ".join(expand(word, scope))


def array_of(word: str, scope: Scope) -> list[str]:
    """The elements of `(a "$b" ...)`."""
    return [text for token in tokens(word[1:-1]) if token.kind == "word" for text in expand(token.text, scope)]


def arithmetic(expression: str, scope: Scope) -> int | None:
    """The number of `(1024 * n)`; None where a part is not known."""
    text = re.sub(r"\$\{?(\w+)\}?", r"\1", expression)
    text = re.sub(r"(?<![/])/(?![/])", "//", text).replace("&&", " and ").replace("||", " or ")
    try:
        return _number(ast.parse(text.strip(), mode="eval").body, scope)
    except (SyntaxError, ArithmeticError):  # another program's text: anything may stand there
        return None


def _number(node: ast.expr, scope: Scope) -> int | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        value = scope.variables.get(node.id)
        return int(value) if isinstance(value, str) and re.fullmatch(r"\s*-?\d+\s*", value) else None
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _number(node.operand, scope)
        return None if inner is None else -inner
    if isinstance(node, ast.BoolOp):
        numbers = [_number(value, scope) for value in node.values]
        if None in numbers:
            return None
        return int(all(numbers) if isinstance(node.op, ast.And) else any(numbers))
    if isinstance(node, ast.BinOp):
        return _calculated(type(node.op), node.left, node.right, scope)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return _calculated(type(node.ops[0]), node.left, node.comparators[0], scope)
    return None


def _calculated(sign: type[ast.AST], left: ast.expr, right: ast.expr, scope: Scope) -> int | None:
    numbers = _number(left, scope), _number(right, scope)
    if sign not in ARITHMETIC or numbers[0] is None or numbers[1] is None:
        return None
    return int(ARITHMETIC[sign](*numbers))


def _split(text: str) -> list[str]:
    """At blanks, those of unknown parts left alone."""
    pieces, known = [""], True
    for number, part in enumerate(text.split(MARK)):
        known = number % 2 == 0
        if not known:
            pieces[-1] += unknown(part)
            continue
        words = re.split(r"\s+", part)
        pieces[-1] += words[0]
        pieces += words[1:]
    return [piece for piece in pieces if piece]


def _parts(word: str, scope: Scope, in_quotes: bool = False) -> list[tuple[Value, bool]]:
    """(text, was it quoted?) from left to right; a list where it is an array's elements."""
    parts: list[tuple[Value, bool]] = []
    at = 0
    while at < len(word):
        end = min(skip(word, at) if not (in_quotes and word[at] in "'(") else at + 1, len(word))
        inner = word[at + 1 : end - 1]
        if word[at] == "\\":
            keeps = in_quotes and word[at + 1 : end] not in ("$", "`", '"', "\\", "\n")
            parts.append((word[at:end] if keeps else word[at + 1 : end], True))
        elif word[at] == "'" and not in_quotes:
            parts.append((inner, True))
        elif word[at] == '"':
            quoted = _parts(inner, scope, in_quotes=True)
            parts += [(text, True) for text, _ in quoted] or [("", True)]
        elif word[at] == "`":
            parts.append((_answered(inner, f"$({inner})", scope), in_quotes))
        elif word[at] == "$":
            text, end = _dollar(word, at, end, scope)
            parts.append((text, in_quotes))
        elif word[at] == "~" and at == 0 and not in_quotes:
            parts.append((unknown("$HOME"), True))
        else:
            parts.append((word[at:end], True))
        at = end
    return parts


def _dollar(word: str, at: int, end: int, scope: Scope) -> tuple[Value, int]:
    whole = word[at:end]
    if whole.startswith("$((") and whole.endswith("))"):
        number = arithmetic(whole[2:-1], scope)
        return (unknown(_filled_in(whole, scope)) if number is None else str(number)), end
    if whole.startswith("$("):
        return _answered(whole[2:-1], whole, scope), end
    if whole.startswith("${"):
        return _parameter(whole[2:-1], whole, scope), end
    if whole.startswith("$'"):
        return whole[2:-1].encode().decode("unicode_escape"), end
    if found := re.compile(r"\w+|[@*#?$!]").match(word, at + 1):
        name = found[0] if not found[0][0].isdigit() else found[0][0]
        return _parameter(name, f"${name}", scope), at + 1 + len(name)
    return "$", at + 1


def _answered(command: str, whole: str, scope: Scope) -> str:
    answer = scope.answer(command)
    return unknown(_filled_in(whole, scope)) if answer is None else answer


def _filled_in(text: str, scope: Scope) -> str:
    """The script's own variables put in, for they have no value outside of it."""

    def value(found: re.Match[str]) -> str:
        known = scope.variables.get(found[1] or found[2])
        return found[0] if not isinstance(known, str) or not is_known(known) else known

    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", value, text)


def _parameter(inner: str, whole: str, scope: Scope) -> Value:
    found = PARAMETER.fullmatch(inner)
    if found is None:
        return unknown(whole)
    name, index, rest = found["name"], found["index"], found["rest"]
    if name in ("@", "*") or name.isdigit() or name in ("#", "?"):
        return _positional(name, rest, whole, scope)
    value = scope.variables.get(name)
    if isinstance(value, list):
        if found["length"]:
            return str(len(value))
        if index in ("@", "*"):
            return value if index == "@" else " ".join(value)
        value = value[int(index or 0)] if (index or "0").isdigit() and int(index or 0) < len(value) else None
    elif index in ("@", "*") and value is None:
        return []
    if found["length"]:
        return unknown(whole) if value is None or not is_known(value) else str(len(value))
    return _with_operator(name, value, rest, whole, scope)


def _positional(name: str, rest: str, whole: str, scope: Scope) -> Value:
    if name in ("@", "*"):
        return list(scope.positional or [])
    if name.isdigit() and scope.positional is not None and 0 < int(name) <= len(scope.positional):
        return scope.positional[int(name) - 1]
    default = DEFAULT.fullmatch(rest)
    return text_of(f'"{default[2]}"', scope) if default and "-" in default[1] else unknown(whole)


def _with_operator(name: str, value: str | None, rest: str, whole: str, scope: Scope) -> str:
    if default := DEFAULT.fullmatch(rest):
        sign, is_set = default[1], value is not None and not (":" in default[1] and value == "")
        if sign[-1] == "+":
            return text_of(default[2], scope) if is_set else ""
        if sign[-1] == "?" or is_set:
            return value if is_set and value is not None else unknown(f"${{{name}}}")
        chosen = text_of(default[2], scope)
        if sign[-1] == "=":
            scope.variables[name] = chosen
        return chosen
    if value is None:
        return unknown(whole)
    if not is_known(value):
        return value if not rest else unknown(_filled_in(whole, scope))
    if rest in (",,", "^^"):
        return value.lower() if rest == ",," else value.upper()
    if trim := TRIM.fullmatch(rest):
        return _trimmed(value, trim[1], text_of(trim[2], scope))
    if replace := REPLACE.fullmatch(rest):
        old, new = replace[2].replace("\\", ""), text_of(replace[3], scope)
        return value.replace(old, new, -1 if replace[1] == "//" else 1)
    return value if not rest else unknown(whole)


def _trimmed(value: str, sign: str, pattern: str) -> str:
    """`${X##*/}` and its kin: the shortest or longest start (#) or end (%) that matches leaves."""
    lengths = range(len(value) + 1) if len(sign) == 1 else range(len(value), -1, -1)
    for length in lengths:
        cut = value[:length] if sign[0] == "#" else value[len(value) - length :]
        if fnmatchcase(cut, pattern):
            return value[length:] if sign[0] == "#" else value[: len(value) - length]
    return value
