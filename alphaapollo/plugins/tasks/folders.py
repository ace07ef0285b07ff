"""Read task folders of Harbor: task.toml, instruction.md, environment/Dockerfile, tests/test.sh, solution/solve.sh.

Names, defaults and older spellings are those of Harbor 0.26 (harbor.models.task.config), which may leave out limits:
a task without them gets those that Harbor had as its defaults before. Unknown keys are ignored.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct, convert

from alphaapollo.data.files import FolderReader
from alphaapollo.types import Json, JsonObject
from alphaapollo.utils.disk import read_small_file
from alphaapollo.utils.hub import DATA_FILE
from alphaapollo.utils.text import show_first

COMPOSE = "environment/docker-compose.yaml"
MAX_DEPTH = 3  # of a task below the folder that contains tasks
CANARY = re.compile(r"<!--.*canary.*-->|#.*canary.*", re.IGNORECASE)  # mark of benchmarks, for filters of training data
TEMPLATE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")
SIZE = re.compile(r"\s*(\d+\.?\d*)\s*([gmk])\s*", re.IGNORECASE)
MEBIBYTES = {"g": 1024.0, "m": 1.0, "k": 1 / 1024}
ROOT = (None, "root", "0", 0)  # users
MAX_BYTES, MAX_DOTS = 1 << 20, 100  # of a text file; of a key in task.toml, because tomllib takes cubic time
QUOTED = re.compile(r"""\"{3}|'{3}|"(?:[^"\\\n]|\\.)*"?|'[^'\n]*'?""")
Positive = Annotated[float, Meta(gt=0, le=1e8)]
Size = Annotated[int, Meta(gt=0, le=1 << 24)]  # MiB
Variables = dict[Annotated[str, Meta(pattern=r"^[^=\0]+$")], Annotated[str, Meta(pattern=r"^[^\0]*$")]]
Network = Literal["no-network", "public", "allowlist"]


class _Phase(Struct, frozen=True):
    """The table [agent]."""

    timeout_sec: Positive = 600.0
    user: str | int | None = None
    network_mode: Network | None = None


class _Verifier(_Phase, frozen=True):
    env: Variables = {}
    environment_mode: Literal["shared", "separate"] | None = None
    environment: JsonObject | None = None
    collect: list[Json] = []


class _Environment(Struct, frozen=True):
    build_timeout_sec: Positive = 600.0
    docker_image: str = ""
    os: str = "linux"
    cpus: Positive = 1.0
    memory_mb: Size | None = None
    storage_mb: Size | None = None
    memory: Json = None  # earlier spelling, e.g. "2G"
    storage: Json = None
    gpus: int = 0
    tpu: Json = None
    mcp_servers: list[Json] = []
    env: Variables = {}
    skills_dir: str = ""
    healthcheck: Json = None
    workdir: str = ""
    network_mode: Network | None = None
    allow_internet: bool = True  # earlier spelling of network_mode

    @property
    def network(self) -> Network:
        return self.network_mode or ("public" if self.allow_internet else "no-network")


class _Name(Struct, frozen=True):
    name: str = ""


class _Solution(Struct, frozen=True):
    env: Variables = {}


class _TaskFile(Struct, frozen=True):
    """The content of task.toml."""

    task: _Name = _Name()
    agent: _Phase = _Phase()
    verifier: _Verifier = _Verifier()
    environment: _Environment = _Environment()
    solution: _Solution = _Solution()
    steps: list[Json] = []


# msgspec describes a class at its first use, and crashes (segmentation fault, 0.22) if two threads do so at once.
convert({}, _TaskFile)


@dataclass(frozen=True)
class HarborTask:
    """A task: the agent's instruction, its sandbox, and the limits of its phases."""

    folder: Path
    name: str
    instruction: str  # without the canary lines at its start
    agent_timeout: float  # seconds, as the other timeouts
    verifier_timeout: float
    build_timeout: float
    cpus: float
    memory_mb: int
    storage_mb: int
    allow_internet: bool
    docker_image: str  # instead of environment/Dockerfile; empty: there is none
    workdir: str  # folder in which commands run; empty: that of the image
    environment: Mapping[str, str]  # variables of all commands
    verifier_environment: Mapping[str, str]  # more variables of the tests
    solution_environment: Mapping[str, str]  # more variables of the solution
    unsupported: tuple[str, ...]  # what the task needs and this project does not have, e.g. `environment.gpus=1`


def find_tasks(folder: Path) -> list[Path]:
    """Return the folders of tasks, sorted: `folder` itself, or those at most MAX_DEPTH below it. A folder with data
    files (other than .json) at its top, and hidden folders, have no tasks."""
    paths = sorted(_find_tasks(folder, MAX_DEPTH), key=lambda task: (len(task.parts), task), reverse=True)
    return sorted({os.path.realpath(task): task for task in paths}.values())  # the shortest of several paths of a task


def _find_tasks(folder: Path, depth: int) -> Iterator[Path]:
    entries: list[os.DirEntry[str]] = []
    with suppress(OSError), os.scandir(folder) as listed:  # some folders must not be read
        entries += listed
    if any(entry.name == "task.toml" for entry in entries):
        yield folder
        return
    if {"task.yaml", "docker-compose.yaml"} <= {entry.name for entry in entries}:
        raise ValueError(f"{folder}: a task of terminal-bench 1. Convert it to the format of Harbor (task.toml).")
    names = [entry.name for entry in entries] if depth == MAX_DEPTH else []
    if any(DATA_FILE.search(name) and not name.endswith(".json") for name in names):
        return
    for entry in entries if depth else ():
        if not entry.name.startswith(".") and entry.is_dir():
            yield from _find_tasks(Path(entry), depth - 1)


def list_task_files(folder: Path) -> list[Path]:
    """Return the files of a task, sorted, except .git and those that read_task refuses."""
    root = os.path.realpath(folder)
    return sorted(path for path in _walk(folder) if path.is_file() and not _explain_file(path, root))


def _walk(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder, and the links to folders, which are not followed."""
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != ".git"]
        paths = (Path(parent, name) for name in (*folders, *names))
        yield from (path for path in paths if path.is_symlink() or not path.is_dir())


def _explain_file(path: Path, root: str) -> str:
    """Return an error message for a link out of the folder `root`, a pipe or a device, else ""."""
    if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(root):
        return f"{path}: a link out of the task's folder. Replace it by a copy of what it links to."
    is_special = path.exists() and not (path.is_file() or path.is_dir())
    return f"{path}: not a regular file. Remove it." if is_special else ""


def read_task_rows(folders: Sequence[Path]) -> list[JsonObject]:
    """Return the rows of tasks, in the columns of RL data. The ValueErrors of all tasks are raised as one."""
    rows, errors = list[JsonObject](), list[str]()
    for folder in folders:
        try:
            rows.append(_make_row(read_task(folder)))
        except ValueError as error:
            errors.append(str(error))
    if errors:
        raise ValueError(f"{len(errors)} of {len(folders)} tasks are invalid:\n  {show_first(errors)}")
    return rows


def _make_row(task: HarborTask) -> JsonObject:
    if not task.instruction.strip():
        reason = f"unsupported: {', '.join(task.unsupported)}" if task.unsupported else "the file is empty"
        raise ValueError(f"{task.folder}/instruction.md: no instruction ({reason}). Write one, or remove the task.")
    return {
        "prompt": [{"role": "user", "content": task.instruction}],
        "data_source": "harbor",
        "env_kwargs": {"task": os.path.abspath(task.folder)},
        "extra_info": {"name": task.name},
    }


TASKS = FolderReader(find_tasks, list_task_files, read_task_rows)


def read_task(folder: Path) -> HarborTask:
    """Read a task. Raises ValueError if a file is missing or unreadable, a value has a wrong type or range, or a link
    leads out of the folder. What is valid but not supported is in `unsupported`."""
    file, root = folder / "task.toml", os.path.realpath(folder)
    if explained := next(filter(None, (_explain_file(path, root) for path in _walk(folder))), ""):
        raise ValueError(explained)
    text = _read_text(file)
    try:
        if any(line.count(".") > MAX_DOTS for line in QUOTED.sub("", text).splitlines()):
            raise ValueError(f"a key has more than {MAX_DOTS} dots")
        config = convert(tomllib.loads(text), _TaskFile, strict=False)
        memory_mb, storage_mb = (_read_size(config.environment, name) for name in ("memory", "storage"))
    except (ValueError, RecursionError, OverflowError) as error:
        raise ValueError(f"{file}: {str(error).replace('$.', '')}. Correct the value.") from error
    environment, verifier = config.environment, config.verifier
    unsupported = [*_list_unsupported(folder, config)]
    is_complete = not (config.steps or _is_separate(verifier)) and environment.os.lower() == "linux"
    if is_complete and not (folder / "tests/test.sh").is_file():
        raise ValueError(f"{folder}/tests/test.sh: no such file. Write the tests that grade the agent's work.")
    has_image = environment.docker_image or COMPOSE in unsupported
    if not has_image and not (folder / "environment/Dockerfile").is_file():
        raise ValueError(f"{folder}/environment/Dockerfile: no such file. Write it, or set environment.docker_image.")
    tables = {"environment": environment.env, "verifier": verifier.env, "solution": config.solution.env}
    variables = {table: _fill_templates(env, f"{table}.env", unsupported) for table, env in tables.items()}
    return HarborTask(
        folder=folder,
        name=config.task.name or os.path.basename(root),
        instruction="" if config.steps else _strip_canary(_read_text(folder / "instruction.md")),
        agent_timeout=config.agent.timeout_sec,
        verifier_timeout=verifier.timeout_sec,
        build_timeout=environment.build_timeout_sec,
        cpus=environment.cpus,
        memory_mb=memory_mb or 2048,
        storage_mb=storage_mb or 10240,
        allow_internet=environment.network == "public",
        docker_image=environment.docker_image,
        workdir=environment.workdir,
        environment=variables["environment"],
        verifier_environment=variables["verifier"],
        solution_environment=variables["solution"],
        unsupported=tuple(unsupported),
    )


def _read_text(file: Path) -> str:
    try:
        return read_small_file(file.resolve(), MAX_BYTES).decode("utf-8-sig")
    except FileNotFoundError as error:
        raise ValueError(f"{file}: no such file. Write it, or remove the task.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: the file is not readable ({error}). Write it as UTF-8 text.") from error


def _strip_canary(text: str) -> str:
    """Remove the canary lines at the start of an instruction, and empty lines after them, as Harbor does."""
    lines = text.split("\n")
    rest = dropwhile(lambda line: CANARY.fullmatch(line.strip()[:1000]), lines)
    return "\n".join(dropwhile(lambda line: not line.strip(), rest))


def _read_size(environment: _Environment, name: str) -> int | None:
    """Return a size in MiB, from `memory_mb` or the earlier spelling `memory = "2G"`."""
    size: int | None = getattr(environment, f"{name}_mb")
    earlier = getattr(environment, name)
    if not isinstance(earlier, str):
        return size
    if not (match := SIZE.fullmatch(earlier)):
        raise ValueError(f"environment.{name}={earlier!r} is not a size such as 2G or 512M")
    value = convert(int(float(match[1]) * MEBIBYTES[match[2].lower()]), Size)
    if size not in (None, value):
        raise ValueError(f"environment.{name}={earlier!r} contradicts environment.{name}_mb={size}")
    return value


def _is_separate(verifier: _Verifier) -> bool:
    return verifier.environment_mode == "separate" or verifier.environment is not None


def _list_unsupported(folder: Path, config: _TaskFile) -> Iterator[str]:
    """Yield what a task needs and this project does not have, except values of variables."""
    environment, verifier = config.environment, config.verifier
    found: JsonObject = {
        "steps (several steps)": config.steps,
        "trajectory.json": (folder / "trajectory.json").exists(),
        COMPOSE: (folder / COMPOSE).exists(),
        f"environment.os={environment.os}": environment.os.lower() != "linux",
        f"environment.gpus={environment.gpus}": environment.gpus,
        "environment.network_mode=allowlist": environment.network == "allowlist",
        "verifier.environment (a sandbox for the tests)": _is_separate(verifier),
        "verifier.collect": verifier.collect,
    }
    names = ("tpu", "mcp_servers", "skills_dir", "healthcheck")
    found |= {f"environment.{name}": getattr(environment, name) for name in names}
    for name, phase in {"agent": config.agent, "verifier": verifier}.items():
        mode = phase.network_mode
        found[f"{name}.user={phase.user}"] = phase.user not in ROOT
        found[f"{name}.network_mode={mode}"] = mode not in (None, environment.network)
    yield from (name for name, is_needed in found.items() if is_needed)


def _fill_templates(variables: Mapping[str, str], table: str, unsupported: list[str]) -> dict[str, str]:
    """Replace `${NAME:-default}` by the default, and add `${NAME}` to `unsupported`. Harbor takes the values from the
    variables of the machine, which a model in training must not see."""
    filled = dict[str, str]()
    for name, value in variables.items():
        match = TEMPLATE.fullmatch(value)
        if match and match[2] is None:
            unsupported.append(f"{value} in {table}")
        else:
            filled[name] = match[2] if match else value
    return filled
