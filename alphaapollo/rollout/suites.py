"""Evaluation suites of other projects: tasks of lm-eval and inspect-ai, run against the HTTP API of a model.

A suite runs in a process with a time limit. Its folder, <run>/suites/<model>/<task>, has

    result.json     its scores, or why it failed (SuiteResult)
    log.txt         what its command printed
    files/          what its command wrote: results, samples, logs
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from os.path import expanduser
from pathlib import Path

import msgspec

from alphaapollo.utils.disk import explain_write_errors, read_small_file, replace_file
from alphaapollo.utils.heartbeat import list_descendants
from alphaapollo.utils.json_types import JsonObject
from alphaapollo.utils.redaction import redact

FOLDER, RESULT, LOG, FILES = "suites", "result.json", "log.txt", "files"
ERROR_LINE = re.compile(r"\b\w+Error\b[:(]|\bERROR\b")
REASON_CHARS = 500


@dataclass(frozen=True)
class ModelServer:
    """OpenAI-compatible server of a model."""

    url: str  # ends with /v1
    api_key: str
    model_name: str  # for requests
    tokenizer: str  # folder or hub id
    context_length: int  # tokens of prompt and answer


@dataclass(frozen=True)
class SuiteScore:
    """A metric of a task, averaged over its rows."""

    task: str
    metric: str
    value: float
    stderr: float | None  # standard error; None: the suite does not compute it
    rows: int


@dataclass(frozen=True)
class SuiteResult:
    """Scores of a suite. If the suite failed, `error` is the reason, and there are no scores."""

    suite: str  # as the user wrote it
    name: str
    model: str  # evaluated model: step_<iteration>, or the name of its folder
    scores: list[SuiteScore]
    error: str = ""

    @property
    def metrics(self) -> dict[str, float]:
        scores = {f"val/suite/{score.task}/{score.metric}": score.value for score in self.scores}
        return {**scores, f"val/suite/{self.name}/failed": float(bool(self.error))}


def make_lm_eval_command(server: ModelServer, task: str, folder: Path) -> list[str]:
    """Requests are token ids, also of chats (--apply_chat_template). Multiple-choice tasks read prompt log-probs."""
    model = {"model": server.model_name, "base_url": f"{server.url}/completions", "tokenizer": server.tokenizer}
    model |= {"tokenizer_backend": "huggingface", "max_length": str(server.context_length), "num_concurrent": "32"}
    words = ["lm_eval", "run", "--model", "local-completions", "--model_args", *map("=".join, model.items())]
    return [*words, "--tasks", task, "--output_path", str(folder), "--log_samples"]


def make_lm_eval_check(suite: Suite) -> list[str]:
    if not re.fullmatch(r"[\w-]+", suite.task) or (suite.working_folder / suite.task).exists():
        return ["-c", "import lm_eval"]  # the task is a file, a folder, a pattern or a list
    words = [word for option in suite.options for word in option.split("=", 1)]
    options = [f"--include_path={value}" for option, value in pairwise(words) if option == "--include_path"]
    return ["-m", "lm_eval", "validate", "--tasks", suite.task, *options]


def read_lm_eval_scores(folder: Path) -> Iterator[SuiteScore]:
    results = _read_only_file(folder, "results_*.json")
    for task, values in results["results"].items():  # tasks and groups
        for key, value in values.items():
            metric, _, filter_name = key.partition(",")
            if filter_name and not metric.endswith("_stderr"):
                stderr = values.get(f"{metric}_stderr,{filter_name}")
                label = metric if filter_name == "none" else f"{metric}/{filter_name}"
                yield SuiteScore(
                    task, label, value, stderr if isinstance(stderr, float) else None, values["sample_len"]
                )


def make_inspect_command(server: ModelServer, task: str, folder: Path) -> list[str]:
    """Requests are chats."""
    words = ["inspect_ai", "eval", task, "--model", f"openai-api/alphaapollo/{server.model_name}"]
    words += ["--model-base-url", server.url, "--max-retries", "2"]
    return [*words, "--log-dir", str(folder), "--log-format", "json", "--display", "plain"]


def make_inspect_check(suite: Suite) -> list[str]:
    """Whether the file has the task is not checked."""
    file = suite.task.partition("@")[0]
    has_file = f"; import os; assert os.path.isfile({file!r})" if file.endswith(".py") else ""
    return ["-c", f"import inspect_ai{has_file}"]


def read_inspect_scores(folder: Path) -> Iterator[SuiteScore]:
    log = _read_only_file(folder, "*.json")
    if log["status"] != "success":  # the exit code is 0 nevertheless
        raise ValueError(log["error"]["message"] if log.get("error") else f"its status is {log['status']}")
    scores = log["results"]["scores"]
    for score in scores:
        values = {name: metric["value"] for name, metric in score["metrics"].items()}
        stderr = values.pop("stderr", None)
        for name, value in values.items():
            label = name if len(scores) == 1 else f"{score['name']}/{name}"
            yield SuiteScore(log["eval"]["task"].rpartition("/")[2], label, value, stderr, score["scored_samples"])


@dataclass(frozen=True)
class SuiteKind:
    """Another project's program that evaluates models."""

    package: str
    key_variable: str  # environment variable of the API key
    make_check: Callable[[Suite], list[str]]  # arguments of Python that fail if the package or the task is missing
    make_command: Callable[[ModelServer, str, Path], list[str]]  # (server, task, folder) -> arguments of `python -m`
    read_scores: Callable[[Path], Iterator[SuiteScore]]  # raises ValueError if the run failed


KINDS = {
    "lm-eval": SuiteKind("lm-eval", "OPENAI_API_KEY", make_lm_eval_check, make_lm_eval_command, read_lm_eval_scores),
    "inspect": SuiteKind(
        "inspect-ai", "ALPHAAPOLLO_API_KEY", make_inspect_check, make_inspect_command, read_inspect_scores
    ),
}


@dataclass(frozen=True)
class Suite:
    """A task of a suite, and how to run it. `text`: KIND:TASK, and options of the kind's own command."""

    text: str
    python: str = ""  # Python with the kind's package; empty: that of .venv/suites if it exists, or this one
    timeout: float = 3600.0  # seconds
    working_folder: Path = field(default_factory=Path.cwd)  # of relative paths; the worker may have another one

    def __post_init__(self) -> None:
        if self.text.partition(":")[0] not in KINDS or not self.task:
            raise ValueError(f"{self.text!r} is no evaluation suite. Write lm-eval:TASK or inspect:FILE.py@TASK.")

    @property
    def kind(self) -> SuiteKind:
        return KINDS[self.text.partition(":")[0]]

    @property
    def words(self) -> list[str]:
        """The task and its options, as a shell reads them."""
        return [*map(expanduser, shlex.split(self.text.partition(":")[2]))]

    @property
    def task(self) -> str:
        return next(iter(self.words), "")

    @property
    def options(self) -> list[str]:
        return self.words[1:]

    @property
    def name(self) -> str:
        """Name of the task in metrics, and of the suite's folder."""
        return self.task.rpartition("@")[2].rpartition("/")[2].removesuffix(".py")

    @property
    def interpreter(self) -> str:
        separate = Path(sys.prefix, "suites", "bin", "python")
        return self.python or str(separate if separate.is_file() else sys.executable)


def check_suites(suites: Sequence[Suite]) -> None:
    """Raise ValueError if a package is not installed, a task is missing, or two suites have the same name."""
    for index, suite in enumerate(suites):
        if suite.name in [other.name for other in suites[:index]]:
            raise ValueError(f"two suites are named {suite.name}. Remove one of them.")
    with ThreadPoolExecutor() as pool:  # each imports its packages for up to half a minute
        list(pool.map(_check_suite, suites))


def _check_suite(suite: Suite) -> None:
    command = [suite.interpreter, *suite.kind.make_check(suite)]
    try:
        subprocess.run(command, check=True, capture_output=True, cwd=suite.working_folder, env=make_environment())
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError(
            f"the suite {suite.text!r} cannot run, because {shlex.join(command)!r} fails. Install the package "
            f"{suite.kind.package}, or set the Python of an environment that has it "
            "(docs/install.md#evaluation-suites), or correct the task or the folder of --include_path."
        ) from error


def make_environment() -> dict[str, str]:
    """Return the environment of a suite, without variables for the packages of this process."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "LD_PRELOAD")}


async def run_suite(suite: Suite, server: ModelServer, folder: Path) -> SuiteResult:
    """Run a suite, and write its result to `folder`. The result has an error if the suite fails or exceeds its time."""
    scores, error, files = list[SuiteScore](), "", folder.absolute() / FILES
    with explain_write_errors("the results of an evaluation suite", folder):
        shutil.rmtree(folder, ignore_errors=True)
        files.mkdir(parents=True)
    try:
        code = await _run_command(suite, server, files)
        if code:
            raise ValueError(f"exit code {code}: {_find_error_line(folder / LOG)}")
        scores = list(suite.kind.read_scores(files))
        if not scores or not all(math.isfinite(score.value) for score in scores):
            raise ValueError(f"not all scores are finite numbers: {scores}")
    except TimeoutError:
        error = f"it did not end within {suite.timeout:g} s"
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as failure:  # results of an unknown format
        kind = "" if isinstance(failure, OSError | ValueError) else f"{type(failure).__name__}: "
        error = f"{kind}{failure}"
    if error:
        scores, error = [], redact(f"{error[:REASON_CHARS]} (see {folder / LOG})")
    result = SuiteResult(suite.text, suite.name, folder.parent.name, scores, error)
    with explain_write_errors("the results of an evaluation suite", folder):
        replace_file(folder / RESULT, [json.dumps(asdict(result), indent=1).encode() + b"\n"])
    return result


async def _run_command(suite: Suite, server: ModelServer, files: Path) -> int:
    """Run the command of a suite, and return its exit code. Raises TimeoutError."""
    with (files.parent / LOG).open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(suite.interpreter, "-m", *suite.kind.make_command(server, suite.task, files), *suite.options),
            env=make_environment() | {suite.kind.key_variable: server.api_key},
            cwd=suite.working_folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            return await asyncio.wait_for(process.wait(), suite.timeout)
        finally:
            for kill, pid in [(os.kill, pid) for pid in list_descendants(process.pid)] + [(os.killpg, process.pid)]:
                with suppress(ProcessLookupError):
                    kill(pid, signal.SIGKILL)


def _find_error_line(output: Path) -> str:
    """Return the first line that names an error, or the last line."""
    lines = [line.strip() for line in output.read_text(errors="replace").splitlines() if line.strip()]
    return next(filter(ERROR_LINE.search, lines), lines[-1] if lines else "it printed nothing")


def _read_only_file(folder: Path, pattern: str) -> JsonObject:
    files = list(folder.rglob(pattern))
    if len(files) != 1:
        raise ValueError(f"it wrote {len(files)} files {pattern} instead of one. Name one task")
    return json.loads(files[0].read_bytes())


def read_suite_results(run_folder: Path) -> list[SuiteResult]:
    """Read the results of all suites that ran on the models of a run, oldest first. Damaged files are left out."""
    results = []
    for file in sorted(run_folder.glob(f"{FOLDER}/*/*/{RESULT}"), key=lambda file: file.stat().st_mtime):
        with suppress(OSError, RecursionError, msgspec.DecodeError):
            results.append(msgspec.json.decode(read_small_file(file), type=SuiteResult))
    return results
