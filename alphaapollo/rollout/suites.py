"""Evaluation suites: tasks that run against the HTTP API of a model. Plug-ins and packages add kinds of suites, e.g.
`lm-eval` in `lm-eval:gsm8k`, to the group `suites` (docs/plugins.md).

The folder of a suite, <run>/suites/<model>/<task>, has

    result.json     its scores, or why it failed (SuiteResult)
    log.txt         what it printed
    files/          what it wrote: results, samples, logs
"""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec

from alphaapollo.utils.disk import explain_write_errors, read_small_file, replace_file
from alphaapollo.utils.plugins import find_plugins, load_plugin
from alphaapollo.utils.redaction import redact

FOLDER, RESULT, LOG, FILES = "suites", "result.json", "log.txt", "files"
REASON_CHARS = 500  # characters of an error in a result


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


@dataclass(frozen=True)
class Suite:
    """Base class of a kind of suites. `text`: KIND:TASK, as the user wrote it. Rollout workers get it in a pickle."""

    text: str
    python: str = ""  # Python of an environment with the packages of the kind; empty: the kind chooses it
    timeout: float = 3600.0  # seconds
    working_folder: Path = field(default_factory=Path.cwd)  # for relative paths; a worker may run in another one

    @property
    def task(self) -> str:
        return self.text.partition(":")[2].strip()

    @property
    def name(self) -> str:
        """Name of the task in metrics, and of the suite's folder."""
        return self.task

    def check(self) -> None:
        """Raise ValueError if the suite cannot run, e.g. because a package or the task is missing."""

    async def run(self, server: ModelServer, folder: Path) -> Sequence[SuiteScore]:
        """Evaluate a model. Raises ValueError or OSError if it failed.

        folder: folder for the suite's files. The suite's output goes to `log.txt` beside the folder."""
        raise NotImplementedError


def make_suites(texts: Sequence[str], python: str = "", timeout: float = 3600.0) -> list[Suite]:
    """Build and check suites. Raises ValueError if a suite has no kind or cannot run, or two have the same name."""
    suites = [_make_suite(text, python, timeout) for text in texts]
    for index, suite in enumerate(suites):
        if suite.name in [other.name for other in suites[:index]]:
            raise ValueError(f"two suites are named {suite.name}. Remove one of them.")
    with ThreadPoolExecutor() as pool:  # each may import its packages for half a minute
        list(pool.map(lambda suite: suite.check(), suites))
    return suites


def _make_suite(text: str, python: str, timeout: float) -> Suite:
    kind: type[Suite] | None = load_plugin("suites", text.partition(":")[0])
    if kind is None or not (suite := kind(text, python, timeout)).task:
        known = " or ".join(f"{name}:TASK" for name in find_plugins("suites"))
        raise ValueError(f"{text!r} is no evaluation suite. Write {known} (docs/evaluation.md#evaluation-suites).")
    return suite


async def run_suite(suite: Suite, server: ModelServer, folder: Path) -> SuiteResult:
    """Run a suite, and write its result to `folder`. The result has an error if the suite fails or exceeds its time."""
    scores, error, files = list[SuiteScore](), "", folder.absolute() / FILES
    with explain_write_errors("the results of an evaluation suite", folder):
        shutil.rmtree(folder, ignore_errors=True)
        files.mkdir(parents=True)
    try:
        scores = [*await asyncio.wait_for(suite.run(server, files), suite.timeout)]
        if not scores or not all(math.isfinite(score.value) for score in scores):
            raise ValueError(f"not all scores are finite numbers: {scores}")
    except TimeoutError:
        error = f"it did not end within {suite.timeout:g} s"
    except Exception as failure:  # noqa: BLE001  the code of a package, and results of an unknown format
        prefix = "" if isinstance(failure, OSError | ValueError) else f"{type(failure).__name__}: "
        error = f"{prefix}{failure}"
    if error:
        scores, error = [], redact(f"{error[:REASON_CHARS]} (see {folder / LOG})")
    result = SuiteResult(suite.text, suite.name, folder.parent.name, scores, error)
    with explain_write_errors("the results of an evaluation suite", folder):
        replace_file(folder / RESULT, [json.dumps(asdict(result), indent=1).encode() + b"\n"])
    return result


def read_suite_results(run_folder: Path) -> list[SuiteResult]:
    """Read the results of all suites that ran on the models of a run, oldest first. Damaged files are left out."""
    results = []
    for file in sorted(run_folder.glob(f"{FOLDER}/*/*/{RESULT}"), key=lambda file: file.stat().st_mtime):
        with suppress(OSError, RecursionError, msgspec.DecodeError):
            results.append(msgspec.json.decode(read_small_file(file), type=SuiteResult))
    return results
