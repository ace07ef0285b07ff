"""Reader of Dockerfiles for sandboxes without docker, which apply the instructions themselves.

    image = read_dockerfile(folder)      image.steps: what to copy and to run, in order

Instructions that need docker, such as a second stage or a download, are listed in `Image.unsupported`.
"""

from __future__ import annotations

import json
import posixpath
import re
import shlex
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import NoReturn

from alphaapollo.plugins.tasks.sandboxes.dockerignore import IgnoredFiles
from alphaapollo.utils.disk import read_small_file

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # docker's, if the image sets none
WITHOUT_EFFECT = ("CMD", "EXPOSE", "LABEL", "HEALTHCHECK", "VOLUME", "STOPSIGNAL", "MAINTAINER")
MAX_BYTES, MAX_INSTRUCTIONS, MAX_EXPANDED = 1 << 20, 1000, 1 << 20  # of a file; characters with replaced variables
DEFAULT_SHELL = ("/bin/sh", "-c")
ROOT_USERS = ("root", "0", "root:root", "0:0", "root:0", "0:root")
IGNORED_COPY_FLAGS = {"chown", "chmod", "link"}

_DIRECTIVE = re.compile(r"#\s*(\w+)\s*=\s*(\S+)\s*$")
_FLAG = re.compile(r"--([a-z-]+)(?:=(\S+))?\s+")
_HEREDOC = re.compile(r"(?:^|\s)\d*<<(-?)([\"']?)([A-Za-z_]\w*)\2(?=\s|$)")
_VARIABLE = re.compile(
    r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?:(:?[-+])((?:[^{}$]|\$\{[^{}]*\}|\$(?!\{))*))?\})",
)
_REMOTE = re.compile(r"(?:https?|git|ssh|ftp)://|git@")


@dataclass(frozen=True)
class Copy:
    """A step that copies files. The content of a folder is merged into the target.

    A target that ends with "/" is a folder, which is created with its parents, also if there are no sources (WORKDIR).
    Another target is the new name of the only source, or a folder if the image has a folder of this name.
    """

    sources: tuple[Path, ...]  # files and folders of the build context; globs are resolved
    target: str  # absolute
    mode: int | None = None  # --chmod
    ignored: IgnoredFiles | None = field(default=None, compare=False)

    def list_files(self) -> Iterator[tuple[Path, Path]]:
        """Yield each file, link and folder to copy, after the folder to which its name is relative."""
        for source in self.sources:
            assert self.ignored is not None
            base = source if source.is_dir() else source.parent
            yield from ((base, path) for path in self.ignored.walk(source) if path != base)


@dataclass(frozen=True)
class Run:
    """A step that runs a command."""

    command: str
    workdir: str
    environment: Mapping[str, str]  # ARG and ENV up to here
    shell: tuple[str, ...] = DEFAULT_SHELL  # program that runs the command, with its arguments; empty: words to execute


@dataclass(frozen=True)
class Image:
    """Content of a Dockerfile."""

    base: str
    steps: tuple[Copy | Run, ...]
    workdir: str
    environment: dict[str, str]
    unsupported: tuple[str, ...]  # instructions that need docker, in the words of the file


@dataclass(frozen=True)
class _Instruction:
    line: int
    text: str  # without line breaks
    keyword: str
    flags: tuple[tuple[str, str], ...]
    rest: str
    documents: tuple[tuple[str, str], ...]  # name and content of each heredoc
    escape: str


@dataclass
class _Stage:
    """Values that the instructions read so far have set."""

    base: str = ""
    workdir: str = "/"
    shell: tuple[str, ...] = DEFAULT_SHELL
    environment: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    steps: list[Copy | Run] = field(default_factory=list)


def read_dockerfile(folder: Path) -> Image:
    """Read the Dockerfile of a folder, which is its build context. Raises ValueError that names file and line."""
    file = folder / "Dockerfile"
    if not file.is_file():
        raise ValueError(f"{file} does not exist. Add a Dockerfile to the folder.")
    try:
        reader = _DockerfileReader(file)
        text = read_small_file(file.resolve(), MAX_BYTES).decode("utf-8-sig", "replace")
        for number, instruction in enumerate(_read_instructions(text), 1):
            if number > MAX_INSTRUCTIONS:
                raise ValueError(f"{file} has more than {MAX_INSTRUCTIONS} instructions. Join some.")
            reader.apply(instruction)
    except OSError as error:
        raise ValueError(f"{file}: {error}. Correct the file.") from error
    stage = reader.stage
    if not stage.base:
        raise ValueError(f"{file} has no FROM. Add one, e.g. FROM ubuntu:24.04.")
    return Image(stage.base, tuple(stage.steps), stage.workdir, stage.environment, tuple(reader.unsupported))


class _DockerfileReader:
    """Apply instructions to a stage."""

    def __init__(self, file: Path):
        self.file = file
        self.stage = _Stage()
        self.unsupported: list[str] = []
        self._global_arguments: dict[str, str] = {}  # of ARG before FROM
        self._expandable = MAX_EXPANDED
        self._ignored = IgnoredFiles(file.parent.resolve())

    def apply(self, instruction: _Instruction) -> None:
        keyword, stage = instruction.keyword, self.stage
        if not stage.base and keyword not in ("FROM", "ARG"):
            self._fail(instruction, f"{keyword} is before FROM. Begin with FROM")
        if keyword == "FROM":
            self._start_stage(instruction)
        elif keyword == "ARG":
            self._declare_arguments(instruction)
        elif keyword == "ENV":
            stage.environment |= self._read_variables(instruction)
        elif keyword == "WORKDIR":
            folder = self._expand(instruction, instruction.rest)
            stage.workdir = posixpath.normpath(posixpath.join(stage.workdir, folder))
            stage.steps.append(Copy((), stage.workdir.rstrip("/") + "/"))
        elif keyword in ("COPY", "ADD"):
            self._copy(instruction)
        elif keyword == "RUN":
            self._run(instruction)
        elif keyword == "SHELL":
            if (words := _parse_json_words(instruction.rest)) is None:
                self._fail(instruction, f'{instruction.text!r} is not in JSON form. Write SHELL ["/bin/bash", "-c"]')
            stage.shell = tuple(words)
        elif keyword == "USER" and self._expand(instruction, instruction.rest) in ROOT_USERS:
            pass
        elif keyword in ("USER", "ENTRYPOINT", "ONBUILD"):
            self.unsupported.append(instruction.text)
        elif keyword not in WITHOUT_EFFECT:
            self._fail(instruction, f"the instruction {keyword} is unknown. Use an instruction of Dockerfiles")

    def _start_stage(self, instruction: _Instruction) -> None:
        """Start the stage of a FROM. Only the last stage becomes the image."""
        if self.stage.base:
            self.unsupported.append(instruction.text)
        words = [self._expand(instruction, word) for word in instruction.rest.split()]
        if not words or not words[0]:
            self._fail(instruction, "FROM has no image. Name one, e.g. FROM ubuntu:24.04")
        self.stage = _Stage(base=words[0])

    def _expand(self, instruction: _Instruction, text: str) -> str:
        stage, values = self.stage, self._global_arguments
        if stage.base and instruction.keyword != "FROM":
            values = {"PATH": DEFAULT_PATH, **stage.arguments, **stage.environment}
        expanded = expand_variables(text, values, instruction.escape, self._expandable)
        self._expandable -= len(expanded)
        if self._expandable <= 0:
            self._fail(instruction, f"the values have more than {MAX_EXPANDED} characters. Shorten them")
        return expanded

    def _declare_arguments(self, instruction: _Instruction) -> None:
        inside = bool(self.stage.base)
        values = self.stage.arguments if inside else self._global_arguments
        for word in _split_words(instruction.rest, instruction.escape):
            name, equals, default = word.partition("=")
            if equals:
                values[name] = self._expand(instruction, default)
            elif inside and name in self._global_arguments:
                values[name] = self._global_arguments[name]

    def _read_variables(self, instruction: _Instruction) -> dict[str, str]:
        """Read ENV NAME=VALUE ... or ENV NAME VALUE."""
        words = _split_words(instruction.rest, instruction.escape)
        if words and "=" not in words[0]:
            name, *value = instruction.rest.split(maxsplit=1)
            words = [f"{name}={value[0]}"] if value else []
        if not words or not all("=" in word for word in words):
            self._fail(instruction, f"{instruction.text!r} has a variable without a value. Write ENV NAME=VALUE")
        pairs = [word.partition("=") for word in words]
        return {name: self._expand(instruction, value) for name, _, value in pairs}

    def _run(self, instruction: _Instruction) -> None:
        if any(name != "mount" or "type=cache" not in value for name, value in instruction.flags):
            self.unsupported.append(instruction.text)
            return
        command, documents, shell = instruction.rest, instruction.documents, self.stage.shell
        if (words := _parse_json_words(command)) is not None:
            command, shell = shlex.join(words), ()
        elif len(documents) == 1 and _HEREDOC.fullmatch(command):
            ((name, command),) = documents
            if command.startswith("#!"):
                command = f"{command.splitlines()[0][2:].strip()} /dev/stdin <<'{name}'\n{command}{name}"
        else:
            command = "\n".join([command, *(f"{content}{name}" for name, content in documents)])
        stage = self.stage
        stage.steps.append(Run(command, stage.workdir, {**stage.arguments, **stage.environment}, shell))

    def _copy(self, instruction: _Instruction) -> None:
        words = _parse_json_words(instruction.rest) or instruction.rest.split()
        *names, target = [self._expand(instruction, word) for word in words] or [""]
        if not names:
            self._fail(instruction, f"{instruction.text!r} has no target. Write {instruction.keyword} SOURCE TARGET")
        flags = dict(instruction.flags)
        mode = flags.get("chmod", "")
        if (
            set(flags) - IGNORED_COPY_FLAGS
            or instruction.documents
            or any(_REMOTE.match(name) for name in names)
            or not re.fullmatch("[0-7]*", mode)
        ):
            self.unsupported.append(instruction.text)
            return
        sources = tuple(path for name in names for path in self._find_sources(instruction, name))
        if instruction.keyword == "ADD" and any(path.is_file() and _is_archive(path) for path in sources):
            self.unsupported.append(instruction.text)
            return
        is_folder = target.endswith("/") or posixpath.basename(target) in (".", "..")
        if len(sources) > 1 and not is_folder:
            self._fail(instruction, f"{target!r} is the target of {len(sources)} sources. Let it end with /")
        path = posixpath.normpath(posixpath.join(self.stage.workdir, target))
        if is_folder or sources[0].is_dir() or any(path + "/" == step.target for step in self._copies()):
            path = path.rstrip("/") + "/"
        self.stage.steps.append(Copy(sources, path, int(mode, 8) if mode else None, self._ignored))

    def _copies(self) -> Iterator[Copy]:
        return (step for step in self.stage.steps if isinstance(step, Copy))

    def _find_sources(self, instruction: _Instruction, name: str) -> list[Path]:
        context = self.file.parent.resolve()
        relative = posixpath.normpath(name.lstrip("/") or ".")
        if relative.split("/")[0] == "..":
            self._fail(instruction, f"{name!r} is outside the folder of the Dockerfile. Move it into {context}")
        found = sorted(context.glob(relative)) if re.search(r"[*?\[]", relative) else [context / relative]
        found = [path for path in found if path.exists() and next(self._ignored.walk(path), None)]
        if not found:
            self._fail(instruction, f"{name!r} does not exist in {context}, or .dockerignore excludes it. Add it")
        if any(not path.resolve().is_relative_to(context) for path in found):
            self._fail(instruction, f"{name!r} links to a path outside {context}. Replace the link by a copy")
        return found

    def _fail(self, instruction: _Instruction, problem: str) -> NoReturn:
        raise ValueError(f"{self.file}:{instruction.line}: {problem}.")


def expand_variables(text: str, variables: Mapping[str, str], escape: str = "\\", max_chars: int = MAX_EXPANDED) -> str:
    """Remove quotes and replace $NAME, ${NAME}, ${NAME:-default} and ${NAME:+other}, as docker does. Unknown variables
    are empty; nothing is replaced in single quotes. Stops after max_chars."""
    result, position, quote = "", 0, ""
    while position < len(text) and len(result) < max_chars:
        char, following = text[position], text[position + 1 : position + 2]
        match = _VARIABLE.match(text, position) if quote != "'" else None
        if quote != "'" and char == escape and following and (not quote or following in ('"', "$", escape)):
            result, position = result + following, position + 2
            continue
        if match:
            name, operator = match[1] or match[2], match[3] or ""
            value = variables.get(name)
            is_set = bool(value) if ":" in operator else value is not None
            if operator and is_set == operator.endswith("+"):
                value = expand_variables(match[4], variables, escape)
            elif operator.endswith("+"):
                value = ""
            result, position = result + (value or ""), match.end()
            continue
        if char in "\"'" and quote in ("", char):
            quote = "" if quote else char
        else:
            result += char
        position += 1
    return result


def _read_instructions(text: str) -> Iterator[_Instruction]:
    """Yield the instructions of a file, without comments and with continued lines joined."""
    lines = [line.rstrip("\r") for line in text.split("\n")]
    escape, position = "\\", 0
    while position < len(lines) and (directive := _DIRECTIVE.match(lines[position].strip())):
        escape = directive[2] if directive[1].lower() == "escape" else escape
        position += 1
    while position < len(lines):
        number, joined, position = _join_lines(lines, position, escape)
        if not joined:
            continue
        keyword, *others = joined.split(maxsplit=1)
        keyword, rest = keyword.upper(), others[0] if others else ""
        flags, documents = list[tuple[str, str]](), tuple[tuple[str, str], ...]()
        if keyword in ("FROM", "RUN", "COPY", "ADD"):
            while flag := _FLAG.match(rest):
                flags.append((flag[1], flag[2] or ""))
                rest = rest[flag.end() :]
        if keyword in ("RUN", "COPY", "ADD"):
            documents, position = _read_heredocs(rest, lines, position)
        yield _Instruction(number, joined, keyword, tuple(flags), rest, documents, escape)


def _join_lines(lines: list[str], position: int, escape: str) -> tuple[int, str, int]:
    """Join a line with the lines that continue it: its number, the text, and the index of the line after them."""
    mark = re.escape(escape)
    number, parts = position + 1, list[str]()
    while position < len(lines):
        line = lines[position]
        position += 1
        if line.strip().startswith("#") or (parts and not line.strip()):
            continue
        if not parts:
            number = position
        part, is_continued = re.subn(rf"(?<!{mark}){mark}[ \t]*$", "", line)
        parts.append(part)
        if not is_continued:
            break
    return number, "".join(parts).strip(), position


def _read_heredocs(rest: str, lines: list[str], position: int) -> tuple[tuple[tuple[str, str], ...], int]:
    """Read the heredocs of an instruction: name and content of each, and the index of the line after them."""
    documents = []
    for dash, _, name in _HEREDOC.findall(rest):
        following = (lines[index] for index in range(position, len(lines)))
        body = list(takewhile(name.__ne__, (line.lstrip("\t") if dash else line for line in following)))
        if position + len(body) == len(lines):
            return (), position  # the shell reports it
        documents.append((name, "".join(f"{line}\n" for line in body)))
        position += len(body) + 1
    return tuple(documents), position


def _split_words(text: str, escape: str) -> list[str]:
    """Split a text at blanks outside of quotes. The words keep their quotes and escapes."""
    mark = re.escape(escape)
    return re.findall(rf"""(?:{mark}.|"(?:{mark}.|[^"{mark}])*"|'[^']*'|[^\s])+""", text)


def _parse_json_words(text: str) -> list[str] | None:
    """Return the words of a JSON form, e.g. ["ls", "-l"], or None for a shell form."""
    try:
        words = json.loads(text) if text.startswith("[") else None
    except json.JSONDecodeError:
        return None
    return words if isinstance(words, list) and words and all(isinstance(word, str) for word in words) else None


def _is_archive(path: Path) -> bool:
    return tarfile.is_tarfile(path) or path.name.endswith((".tar.zst", ".tzst"))
