"""List the commands of a shell script without running it: variables, arrays and integers are computed.

A value that only the machine has is text between \\2 and \\3, e.g. `\\2${HOME}\\3/data`; the reason why a value is not
known is between \\5 and \\6. While a word is expanded, \\0 separates words, and \\1 marks quoted text.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
from collections.abc import Callable
from typing import NamedTuple

MACHINE_VALUE, UNKNOWN = re.compile("\2([^\3]*)\3"), re.compile("\5([^\6]*)\6")
MAX_SOURCE = 256 << 10  # characters of a file
MAX_SCRIPT = 96 << 10  # bytes of a shell script
MAX_EXPANDED = 4 << 20  # characters of all words together, because variables can double each other
TOKENS = {
    "blank": re.compile(r"(?:[ \t]|\\\n|(?<![^\s;&|()])#[^\n]*)+"),
    "here": re.compile(r"\d*<<-?[ \t]*(?P<quote>['\"\\]?)(?P<name>\w+)['\"]?"),
    "redirection": re.compile(r"(?:\d*(?:<<<|>>|>\||[<>]&|<>|[<>](?!\())|&>>?)[ \t]*"),
    "test": re.compile(r"\[\[ [^\n]{0,500}? \]\]|\([ \t]*\)"),  # also the () of a function
    "operator": re.compile(r"\n|;;&?|;&|&&|\|\||\|&|[;&|)]|\((?!\()"),
}
PAIRS = {"$((": "))", "$(": ")", "<(": ")", ">(": ")", "((": "))", "${": "}", '"': '"', "`": "`"}
QUOTED = re.compile(r"'[^']*'|\$'(?:\\.|[^'\\])*'", re.DOTALL)
VARIABLE = re.compile(r"\$(?:[A-Za-z_]\w*|[0-9@*#?$!-])")
PARAMETER = re.compile(r"(\w+|[@*])(?:\[([@*]|\d+)\])?(?:(:?[-=?+])(.*))?", re.DOTALL)
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
BLOCKS = {"if": "fi", "for": "done", "while": "done", "until": "done", "select": "done", "case": "esac", "{": "}"}
KEYWORDS = ("then", "do", "else", "elif", "!", "time", "function")
DECLARING = ("export", "declare", "local", "readonly", "typeset")
SETTING = {  # commands that set variables: pattern of the names
    **dict.fromkeys(("((", "let"), r"([A-Za-z_]\w*)\s*(?:[-+*/%]?=(?!=)|\+\+|--)"),
    "printf": r" -v (\w+)",
    **dict.fromkeys(("for", "select"), r"(?:for |select |\(\()(\w+)"),
    **dict.fromkeys(("read", "mapfile", "readarray", "unset", "getopts"), r" ([A-Za-z_]\w*)"),
}
MACHINE = ("HOME", "PWD", "PATH", "HOSTNAME", "RANDOM", "SECONDS")
OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "Add": int.__add__,
    "Sub": int.__sub__,
    "Mult": int.__mul__,
    "Div": lambda a, b: int(a / b),
    "Mod": lambda a, b: a - b * int(a / b),  # towards 0, as in C
}
SCRIPT_FOLDER = re.compile(
    r"(?:\b(?:cd|dirname|realpath|readlink -f|pwd|BASH_SOURCE\[0\])|\$0|--|&&|/\.\.|[\s\"${}()])+"
)
"""What a script writes for its own folder, e.g. `cd "$(dirname "$0")/.." && pwd`."""
Value = str | list[str]


class Command(NamedTuple):
    """Command of a script."""

    line: int
    words: list[str]
    condition: str  # e.g. "inside `if` (line 3)"; empty if it runs unless an earlier command fails


def remove_shell_marks(text: str) -> str:
    """Return a text of a file without the characters that mark a value of the shell."""
    return re.sub("[\0-\6]", "", text)


def list_script_commands(source: str, path: str, variables: dict[str, str]) -> list[Command]:
    """Return the commands of the script `source`, with those of all branches. Raises ValueError if the script is not
    complete or too long.

    variables: values that the script's assignments do not change; `1`, `2`, ... are its arguments."""
    if len(source.encode()) > MAX_SCRIPT:
        raise ValueError(f"{path} is larger than {MAX_SCRIPT >> 10} KiB. Port only the training script.")
    reader = _ScriptReader(path, variables)
    try:
        reader.read(remove_shell_marks(source).replace("\r\n", "\n") + "\n\n")
    except ValueError as error:
        raise ValueError(f"{path}: line {reader.line}: {error}. Correct the script.") from None
    return reader.commands


def _find_end(text: str, start: int, inside: str = "") -> int:
    """Return the end of the part of `text` at `start`: a quoted text, an expansion, or a character. inside: what closes
    the text around it. Raises ValueError if a part has no end."""
    if start >= len(text):
        raise ValueError(f"{inside} is missing")
    if text[start] == "\\":
        return start + 2
    if inside != '"' and (quoted := QUOTED.match(text, start)):
        return quoted.end()
    if inside != '"' and text[start] == "'":
        raise ValueError("' is missing")
    opening = next((opening for opening in PAIRS if text.startswith(opening, start)), "")
    if opening or (text[start] == "(" and inside in (")", "))")):
        start, closing = start + len(opening or "("), PAIRS.get(opening, ")")
        while not text.startswith(closing, start):
            start = _find_end(text, start, closing)
        return start + len(closing)
    name = VARIABLE.match(text, start)
    return name.end() if name else start + 1


def _find_token(text: str, place: int) -> tuple[str, re.Match[str] | None, int]:
    """Return the kind of the token at `place`, its match and its end."""
    for kind, pattern in TOKENS.items():
        if match := pattern.match(text, place):
            place = match.end()
            if kind != "redirection":
                return kind, match, place
            break
    else:
        kind, match = "word", None
    while text[place : place + 1] not in " \t\n;&|()<>" or text.startswith(("<(", ">(", "(("), place):
        place = _find_end(text, place)
    return kind, match, place


def _mark(text: str) -> str:
    """Return a text of the shell as a value of the machine, or only the reasons why parts of it are not known."""
    reasons = "".join(reason[0] for reason in UNKNOWN.finditer(text))
    return reasons or f"\2{' '.join(remove_shell_marks(text).split())}\3"


def _split(text: str) -> str:
    """Separate the words of an expansion that is not quoted."""
    return re.sub("(\2[^\3]*\3|\5[^\6]*\6)|\\s+", lambda part: part[1] or "\0", text)


def _compute(node: ast.AST) -> int:
    """Compute + - * / % of integers. Raises ValueError for all else."""
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.BinOp(left=left, op=operation, right=right) if type(operation).__name__ in OPERATIONS:
            return OPERATIONS[type(operation).__name__](_compute(left), _compute(right))
    raise ValueError("other arithmetic")


class _ScriptReader:
    """Reader of one script, with the values of its variables so far."""

    def __init__(self, path: str, variables: dict[str, str]):
        self.path, self.given, self.line, self.left = path, variables, 1, MAX_EXPANDED
        self.values: dict[str, Value] = {name: f"\2${{{name}}}\3" for name in MACHINE}
        self.values |= {"BASH_SOURCE": [path], **variables}
        self.arguments = [variables[name] for name in sorted(filter(str.isdigit, variables), key=int)]
        self.blocks: list[tuple[str, int]] = []  # keywords and lines of the blocks that have no end yet
        self.functions: list[tuple[list[str], int, str]] = []  # commands in braces
        self.is_function = self.is_ended = False
        self.commands: list[Command] = []

    def read(self, text: str) -> None:
        """Read a script. Commands in braces are read last, because a function is called after it is defined."""
        words, here, place, first, before, is_array = list[list[str]](), list[re.Match[str]](), 0, 1, "", False
        while place < len(text) and not self.is_ended:
            kind, match, end = _find_token(text, place)
            token = text[place:end]
            if match and kind == "here":
                here.append(match)
            elif kind == "word" and is_array:
                words[-1].append(token)
            elif kind == "word" and token == "{" and len(words) < 2:  # a group, or the function words[0]
                words = []
                self.blocks.append((token, self.line))
            elif kind == "word" and (words or not self._read_keyword(token)):
                first = first if words else self.line
                words.append([token])
            elif token == "(" and words and words[-1][0].endswith("="):
                words[-1][0] += token
                is_array = True
            elif token == ")" and is_array:
                is_array = False
            elif kind == "operator" and not is_array:
                texts = list[str]()
                for one in here if token == "\n" else ():
                    body = re.compile(rf"(.*?)^\t*{one['name']}$", re.DOTALL | re.MULTILINE).match(text, end)
                    if body is None:
                        raise ValueError(f"{one['name']}, the end of a here-document, is missing")
                    texts, end = [body[1] if one["quote"] else self._expand(body[1], is_quoted=True)], body.end()
                if words:
                    self._run(words, first, before, texts)
                before = token if words or token not in "\n(" else before
                words, here = [], [] if token == "\n" else here
            self.line += text.count("\n", place, end)
            place = end
        if self.blocks and not self.is_ended:
            keyword, self.line = self.blocks[-1]
            raise ValueError(f"{BLOCKS[keyword]}, the end of {keyword}, is missing")
        self.is_function = True
        for command in self.functions:
            self._run_program(*command)

    def _read_keyword(self, token: str) -> bool:
        """Read the first word of a command. Returns whether it is only a keyword."""
        if token in BLOCKS:
            self.blocks.append((token, self.line))
            return token not in SETTING
        if token in BLOCKS.values() and (not self.blocks or BLOCKS[self.blocks.pop()[0]] != token):
            raise ValueError(f"{token} is unexpected")
        return token in KEYWORDS or token in BLOCKS.values()

    def _run(self, words: list[list[str]], line: int, before: str, here: list[str]) -> None:
        """Read a command that may set variables. words: each with the items of its array. here: its here-document."""
        block = f"inside `{self.blocks[-1][0]}` (line {self.blocks[-1][1]})" if self.blocks else ""
        condition = block or (f"after {before} (line {line})" if before in ("&&", "||") else "")
        texts = [word[0] for word in words]
        name = "((" if texts[0].startswith("((") else texts[0]
        if name in DECLARING or all(map(ASSIGNMENT.fullmatch, texts)):
            for word in words:
                self._run_assignment(word, condition)
        elif name == "read" and here:
            self._assign(texts[-1], here[-1], condition)
        elif name in SETTING:
            for one in re.findall(SETTING[name], " ".join(texts)):
                self._assign(one, "", f"by `{name}` (line {line})")
        elif name == "exit" and not condition:
            self.is_ended = True
        elif "{" in dict(self.blocks):
            self.functions.append((texts, line, block))
        else:
            self._run_program(texts, line, condition if before != "&&" else block)

    def _run_assignment(self, word: list[str], condition: str) -> None:
        if match := ASSIGNMENT.fullmatch(word[0]):
            name, plus, text = match.groups()
            value: Value = (
                self.expand_to_text(text) if text != "(" else [one for item in word[1:] for one in self.expand(item)]
            )
            old = self.values.get(name)
            if plus and old is not None:
                both = isinstance(old, str) and isinstance(value, str)
                value = f"{old}{value}" if both else [*([old] if isinstance(old, str) else old), *value]
            self._assign(name, value, condition)

    def _assign(self, name: str, value: Value, condition: str) -> None:
        if name not in self.given:
            self.values[name] = f"\5{name} is set {condition}\6" if condition else value

    def _run_program(self, texts: list[str], line: int, condition: str) -> None:
        count = next((i for i, text in enumerate(texts) if not ASSIGNMENT.fullmatch(text)), len(texts))
        found = [word for text in texts[count:] for word in self.expand(text)]
        if found[:1] == ["shift"] and not condition:
            self.arguments = self.arguments[int("".join(found[1:]) or 1) :]
        elif found[:1] in (["cd"], ["pushd"]):
            self.values["PWD"] = _mark(f"$(cd {found[-1]} && pwd)")
        elif found:
            if {"swift", "megatron"} & {*found}:  # ms-swift reads these from the environment
                set_here = {
                    text.partition("=")[0]: self.expand_to_text(text.partition("=")[2]) for text in texts[:count]
                }
                environ = {**self.values, **set_here}
                found += [f"{name}={environ[name]}" for name in ("NPROC_PER_NODE", "NNODES") if environ.get(name)]
            self.commands.append(Command(line, found, condition))

    def expand(self, text: str) -> list[str]:
        """Return the words that a word of the script becomes."""
        return [word.replace("\1", "") for word in self._expand(text, is_quoted=False).split("\0") if word]

    def expand_to_text(self, text: str) -> str:
        """Return a word of the script as one text, which is not split."""
        return self._expand(text, is_quoted=False).replace("\0", " ").replace("\1", "")

    def _expand(self, text: str, is_quoted: bool) -> str:
        found, start = list[str](), 0
        while start < len(text):
            end = _find_end(text, start, '"' if is_quoted else "")
            found.append(self._expand_part(text[start:end], is_quoted))
            start = end
        expanded = "".join(found)
        self.left -= len(expanded) + 1
        if self.left < 0:
            raise ValueError(f"the values are longer than {MAX_EXPANDED >> 20} MiB")
        return re.sub("^~(?=/|$)", "\2${HOME}\3", expanded) if not is_quoted else expanded

    def _expand_part(self, part: str, is_quoted: bool) -> str:
        if part[0] == "\\":
            keeps_backslash = is_quoted and part[1:] not in ("$", "`", '"', "\\", "\n")
            return part if keeps_backslash else part[1:].replace("\n", "")
        if part[0] == "'" and not is_quoted:
            return f"\1{part[1:-1]}"
        if part.startswith("$'") and not is_quoted:
            return "\1" + remove_shell_marks(part[2:-1].encode("latin-1", "backslashreplace").decode("unicode_escape"))
        if part[0] == '"' and len(part) > 1:
            is_list = re.fullmatch(r"\$@|\$\{(?:\w+\[)?@[^}]*\}", part[1:-1])
            return "\1" * (not is_list) + self._expand(part[1:-1], is_quoted=True)
        if part.startswith("$(("):
            return self._compute_arithmetic(part[3:-2])
        if part.startswith(("$(", "`")):
            return self._read_substitution(part[1:-1] if part[0] == "`" else part[2:-1])
        if part[0] == "$" and len(part) > 1:
            return self._expand_parameter(part[2:-1] if part[1] == "{" else part[1:], is_quoted)
        return part

    def _expand_parameter(self, text: str, is_quoted: bool) -> str:
        match = PARAMETER.fullmatch(text)
        if match is None:  # e.g. ${NAME##*/}
            is_list = text[0] in "@*" or "[@]" in text
            return f"\5${{{text}}} is not computed\6" if is_list else _mark(f"${{{text}}}")
        name, index, form, other = match.groups()
        value = self._find_value(name, index)
        is_unset = value is None or ((form or "").startswith(":") and not value)
        if form and (form[-1] == "+" or (form[-1] in "-=" and is_unset)):
            return "" if form[-1] == "+" and is_unset else self._expand(other, is_quoted)
        if value is None:
            value = [] if index else f"\2${{{name}}}\3"
        texts = [value] if isinstance(value, str) else value
        if is_quoted:
            return value if isinstance(value, str) else "\0".join(f"\1{one}" for one in texts)
        return "\0".join(map(_split, texts))

    def _find_value(self, name: str, index: str | None) -> Value | None:
        """Return the value of a variable or argument, all items of an array, or None if it is not set."""
        if self.is_function and (name in "@*" or name.isdigit()) and name != "0":
            return f"\5${name} is an argument of a function\6"
        if name in "@*":
            return self.arguments
        if name.isdigit():
            return [self.path, *self.arguments][int(name)] if int(name) <= len(self.arguments) else None
        value = self.values.get(name)
        if value is None or (isinstance(value, str) and index is None):
            return value
        items = value if isinstance(value, list) else shlex.split(value) if name in self.given else [value]
        if index in ("@", "*"):
            return items
        return next(iter(items[int(index or 0) :]), None)

    def _read_substitution(self, text: str) -> str:
        """Return the output of a command as a value of the machine."""
        if text.strip() == "pwd":
            return str(self.values["PWD"])
        if "dirname" in text and SCRIPT_FOLDER.fullmatch(text):
            up = "/.." * (text.count("dirname") + text.count("/.."))
            return os.path.normpath(self.path + up)
        if not re.search(r"['\"\\]", text):  # in others, it is not known which variables are quoted
            text = re.sub(r"\$\{?([A-Za-z_]\w*)\}?", lambda name: self._expand_parameter(name[1], is_quoted=True), text)
        return _mark(f"$({text})")

    def _compute_arithmetic(self, text: str) -> str:
        """Return an integer, or the expression as a value of the machine."""
        text = re.sub(
            "(\2[^\3]*\3|\5[^\6]*\6)|[A-Za-z_]\\w*",
            lambda part: part[1] or self._expand_parameter(part[0], is_quoted=True),
            self._expand(text, is_quoted=True),
        )
        try:
            return str(_compute(ast.parse(text.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ArithmeticError):
            return _mark(f"$(({text}))")
