"""Shell commands of the documentation pages, and their markings.

Indented blocks, and fenced blocks labelled bash, sh, shell or not at all, are shell commands. In a block labelled
console, lines that start with `$ ` are commands and the others are their output. Other blocks are not shell.
"""

from __future__ import annotations

import itertools
import re
import shlex
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[1]
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
HAS_PLUGINS = (ROOT / "alphaapollo/plugins").is_dir()
NEEDS_PLUGINS = pytest.mark.skipif(not HAS_PLUGINS, reason="pages and examples use plug-ins")
DOCS = DOCS * HAS_PLUGINS
SKILL = ROOT / "alphaapollo/plugins/skill/SKILL.md"
PAGES = [*DOCS, *sorted((ROOT / "examples").rglob("README.md")), SKILL] * HAS_PLUGINS
SHELL = ("", "bash", "sh", "shell", "console")
SAVED = ("python", "yaml")  # blocks that a command on the page may name as a file
MARKING = re.compile(r"<!--\s*not run\b:?\s*(.*?)\s*-->", re.DOTALL)
LINE_MARKING = re.compile(r"#.*?\bnot run\b:?\s*(.*)$")
HEREDOC = re.compile(r"<<-?\s*['\"]?(\w+)")
HEREDOC_TEXT = re.compile(r"(<<-?\s*['\"]?\w.*)\n[\s\S]*")
KEY = re.compile(r"[a-z]\w*(?:\.\w+)*=")

PROGRAMS = {
    "alphaapollo", "python", "bash", "source", "eval", "export", "cd", "cat", "head", "tail", "mkdir", "cp", "echo",
}  # fmt: skip
ASSIGNMENT = re.compile(r"[A-Z_]+=")
OPERATORS = ("|", "&&", "||", ";")
MODULES = re.compile(r"(alphaapollo|examples|scripts|tests|json\.tool)\b")
HOW_TO_MARK = "write `<!-- not run: REASON -->` above the block, or `# not run: REASON` after the command"
NO_SHELL = "label text and output as ```text"


@dataclass(frozen=True)
class Command:
    """One command of a block: its first line on the page, its text with continuation lines, the reason why it is not
    run."""

    line: int
    text: str
    reason: str | None = None

    @property
    def words(self) -> list[str]:
        """Words and operators, without the text of a heredoc. Raises ValueError for an open quote."""
        text = HEREDOC_TEXT.sub(r"\1", self.text).replace("\\\n", " ")
        lexer = shlex.shlex(text, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        return list(lexer)

    @property
    def is_keys(self) -> bool:
        """Whether the command consists only of keys, which a reader adds to a command of alphaapollo."""
        return all(KEY.match(word) for word in self.words)

    def find_problem(self) -> str:
        """Return why a test cannot run the command, or an empty text."""
        if self.text.lstrip().startswith("#"):
            return "the marking has no command"
        if self.reason is not None:
            return "" if self.reason else "the marking has no reason"
        try:
            words = self.words
        except ValueError as error:
            return f"this is not shell ({error}); {NO_SHELL}"
        if self.is_keys:
            return ""
        parts = [[*part] for is_operator, part in itertools.groupby(words, OPERATORS.__contains__) if not is_operator]
        if len(parts) > 1 and any(part[0] == "make" for part in parts):
            return "the tests do not run make with other commands"
        return next(filter(None, map(find_unknown_program, parts)), "")


def find_unknown_program(words: list[str]) -> str:
    """Return why a test cannot run the program that the words start with, or an empty text."""
    program, *arguments = [*itertools.dropwhile(ASSIGNMENT.match, words), "", ""]
    if program == "make":
        others = {word for word in arguments if word and "=" not in word} - targets_of_ci()
        return f"the tests do not run make {' '.join(sorted(others))}" if others else ""
    name = program.removeprefix(".venv/bin/")
    if name == "python" and arguments[0] == "-m":
        return "" if MODULES.match(arguments[1]) else f"the tests do not run the module {arguments[1]}"
    script = f"{program} {arguments[0]}" if name == "python" else program
    if not program or name in PROGRAMS - {"python"} or ("/" in script and (ROOT / script.split()[-1]).is_file()):
        return ""
    return f"the tests do not run the program `{script}`; {NO_SHELL}"


@cache
def targets_of_ci() -> set[str]:
    """Targets of make that CI runs. Its run of all tests includes those of `make test`."""
    words = " ".join(
        re.findall(r"^run make ([^#\n]*)", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE)
    )
    return {"test", *(word for word in words.split() if not word.startswith("-"))}


@dataclass(frozen=True)
class Block:
    """A block of shell commands.

    first_line: Line of the page with the first line of the block.
    output: Expected output (console).
    files: Nearest blocks of SAVED labels above, {label: text}.
    """

    first_line: int
    commands: list[Command]
    output: str
    files: dict[str, str]

    def make_script(self) -> str:
        """Return a bash script of the commands that are run, each in the line of the block that it has on the page."""
        lines: list[str] = []
        for command in self.commands:
            if command.reason is None and not command.text.startswith("make "):
                lines += [""] * (command.line - self.first_line - len(lines))
                lines += (f"keys {command.text}" if command.is_keys else command.text).split("\n")
        return "\n".join(lines) + "\n"


def read_page(text: str) -> tuple[list[Block], list[str]]:
    """Return the blocks of shell commands of a page, and the problems of its commands: `LINE: COMMAND: PROBLEM`."""
    blocks: list[Block] = []
    problems: list[str] = []
    files: dict[str, str] = {}
    marking: tuple[int, str] | None = None  # of the token before
    for token in MarkdownIt("commonmark").parse(text):
        label = (token.info.split() or [""])[0]
        is_shell = token.type in ("fence", "code_block") and label in SHELL
        if marking and not is_shell:
            problems.append(f"{marking[0]}: the marking is not above a block of shell commands")
        if is_shell and token.map:
            first_line = token.map[0] + (2 if token.type == "fence" else 1)
            commands, output = split_commands(token.content, first_line, label == "console", marking)
            blocks.append(Block(first_line, commands, output, dict(files)))
            found = [(command, problem) for command in commands if (problem := command.find_problem())]
            problems += [f"{command.line}: {command.text}: {why}, or {HOW_TO_MARK}" for command, why in found[:1]]
        elif token.type == "fence" and label in SAVED:
            files[label] = token.content
        comment = MARKING.fullmatch(token.content.strip()) if token.type == "html_block" else None
        marking = (token.map[0] + 1, comment[1]) if comment and token.map else None
    if marking:
        problems.append(f"{marking[0]}: the marking is not above a block of shell commands")
    return blocks, problems


def split_commands(
    text: str, first_line: int, is_console: bool, marking: tuple[int, str] | None
) -> tuple[list[Command], str]:
    """Split a block into its commands and, for a console, the output between them."""
    commands: list[Command] = []
    output: list[str] = []
    lines = iter(enumerate(text.rstrip("\n").split("\n"), first_line))
    for number, line in lines:
        if is_console and not line.startswith("$ "):
            output.append(line)
            continue
        whole = line.removeprefix("$ ")
        heredoc = HEREDOC.search(whole)
        while whole.endswith("\\") or (heredoc and whole.rsplit("\n", 1)[-1].strip() != heredoc[1]):
            whole += "\n" + next(lines, (0, heredoc[1] if heredoc else ""))[1]
        own = LINE_MARKING.search(whole)
        reason = marking[1] if marking else own[1].strip() if own else None
        if own or (whole.strip() and not whole.strip().startswith("#")):
            commands.append(Command(number, whole, reason))
    return commands, "\n".join(output)
