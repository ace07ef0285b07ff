"""Suites of other projects' programs: tasks of lm-eval and inspect-ai, each in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from os.path import expanduser
from pathlib import Path
from typing import ClassVar

from alphaapollo.rollout.suites import LOG, ModelServer, Suite, SuiteScore
from alphaapollo.utils.heartbeat import list_descendants
from alphaapollo.utils.json_types import JsonObject

ERROR_LINE = re.compile(r"\b\w+Error\b[:(]|\bERROR\b")


class ProgramSuite(Suite):
    """Task of a program, with options of the program's own command in the text."""

    package: ClassVar[str]
    key_variable: ClassVar[str]  # environment variable of the API key

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
        return self.task.rpartition("@")[2].rpartition("/")[2].removesuffix(".py")

    @property
    def interpreter(self) -> str:
        """The Python of the suite: by default that of .venv/suites if it exists, or this one."""
        separate = Path(sys.prefix, "suites", "bin", "python")
        return self.python or str(separate if separate.is_file() else sys.executable)

    def make_check(self) -> list[str]:
        """Return arguments of Python that fail if the package or the task is missing."""
        raise NotImplementedError

    def make_command(self, server: ModelServer, folder: Path) -> list[str]:
        """Return arguments of `python -m`, without the options of the text. folder: for its files."""
        raise NotImplementedError

    def read_scores(self, folder: Path) -> Iterator[SuiteScore]:
        """Read the scores from the files of the program. Raises ValueError if it failed."""
        raise NotImplementedError

    def check(self) -> None:
        command = [self.interpreter, *self.make_check()]
        try:
            subprocess.run(command, check=True, capture_output=True, cwd=self.working_folder, env=make_environment())
        except (OSError, subprocess.CalledProcessError) as error:
            raise ValueError(
                f"the suite {self.text!r} cannot run, because {shlex.join(command)!r} fails. Install the package "
                f"{self.package}, or set the Python of an environment that has it "
                "(docs/install.md#evaluation-suites), or correct the task or the folder of --include_path."
            ) from error

    async def run(self, server: ModelServer, folder: Path) -> list[SuiteScore]:
        with (log := folder.parent / LOG).open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *(self.interpreter, "-m", *self.make_command(server, folder), *self.options),
                env=make_environment() | {self.key_variable: server.api_key},
                cwd=self.working_folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                code = await process.wait()
            finally:  # also if the call is cancelled
                for kill, pid in [(os.kill, pid) for pid in list_descendants(process.pid)] + [(os.killpg, process.pid)]:
                    with suppress(ProcessLookupError):
                        kill(pid, signal.SIGKILL)
        if code:
            raise ValueError(f"exit code {code}: {_find_error_line(log)}")
        return list(self.read_scores(folder))


class LmEvalSuite(ProgramSuite):
    """Task, group or tag of lm-eval. Requests are token ids, also of chats (--apply_chat_template). Multiple-choice
    tasks read prompt log-probs."""

    package, key_variable = "lm-eval", "OPENAI_API_KEY"

    def make_check(self) -> list[str]:
        if not re.fullmatch(r"[\w-]+", self.task) or (self.working_folder / self.task).exists():
            return ["-c", "import lm_eval"]  # the task is a file, a folder, a pattern or a list
        words = [word for option in self.options for word in option.split("=", 1)]
        options = [f"--include_path={value}" for option, value in pairwise(words) if option == "--include_path"]
        return ["-m", "lm_eval", "validate", "--tasks", self.task, *options]

    def make_command(self, server: ModelServer, folder: Path) -> list[str]:
        model = {"model": server.model_name, "base_url": f"{server.url}/completions", "tokenizer": server.tokenizer}
        model |= {"tokenizer_backend": "huggingface", "max_length": str(server.context_length), "num_concurrent": "32"}
        words = ["lm_eval", "run", "--model", "local-completions", "--model_args", *map("=".join, model.items())]
        return [*words, "--tasks", self.task, "--output_path", str(folder), "--log_samples"]

    def read_scores(self, folder: Path) -> Iterator[SuiteScore]:
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


class InspectSuite(ProgramSuite):
    """Task of inspect-ai, FILE.py@TASK or that of an installed package. Requests are chats."""

    package, key_variable = "inspect-ai", "ALPHAAPOLLO_API_KEY"

    def make_check(self) -> list[str]:
        """Whether the file has the task is not checked."""
        file = self.task.partition("@")[0]
        has_file = f"; import os; assert os.path.isfile({file!r})" if file.endswith(".py") else ""
        return ["-c", f"import inspect_ai{has_file}"]

    def make_command(self, server: ModelServer, folder: Path) -> list[str]:
        words = ["inspect_ai", "eval", self.task, "--model", f"openai-api/alphaapollo/{server.model_name}"]
        words += ["--model-base-url", server.url, "--max-retries", "2"]
        return [*words, "--log-dir", str(folder), "--log-format", "json", "--display", "plain"]

    def read_scores(self, folder: Path) -> Iterator[SuiteScore]:
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


def make_environment() -> dict[str, str]:
    """Return the environment of a suite, without variables for the packages of this process."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "LD_PRELOAD")}


def _find_error_line(output: Path) -> str:
    """Return the first line that names an error, or the last line."""
    lines = [line.strip() for line in output.read_text(errors="replace").splitlines() if line.strip()]
    return next(filter(ERROR_LINE.search, lines), lines[-1] if lines else "it printed nothing")


def _read_only_file(folder: Path, pattern: str) -> JsonObject:
    files = list(folder.rglob(pattern))
    if len(files) != 1:
        raise ValueError(f"it wrote {len(files)} files {pattern} instead of one. Name one task")
    return json.loads(files[0].read_bytes())
