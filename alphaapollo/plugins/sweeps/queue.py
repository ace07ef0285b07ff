"""Processes of the runs of a sweep, on the GPUs of this machine."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from alphaapollo.config.changes import find_changes
from alphaapollo.config.resolve import resolve_controller, resolve_device
from alphaapollo.config.schema import Config, TuningConfig
from alphaapollo.controller.placement import count_gpus_of_node, detect_machine, list_visible_gpus
from alphaapollo.observability.console import QUIET_SECONDS
from alphaapollo.observability.metric_texts import format_duration
from alphaapollo.observability.terminal import Terminal, shorten_text
from alphaapollo.plugins.viewer.run_folders import read_run_state
from alphaapollo.run_process import INTERRUPTED, find_error, start_run_process, stop_run_processes
from alphaapollo.runs.command_history import read_history
from alphaapollo.runs.input_digests import compute_input_digests
from alphaapollo.runs.resume import read_saved_config
from alphaapollo.runs.run_plan import read_input_digests
from alphaapollo.utils.redaction import redact

SWEPT = ("rl", "sft", "dpo", "rm", "distill")  # subcommands
MAX_ERROR = 300  # characters
POLL_SECONDS = 0.2
MAY_CHANGE = {"trainer.stop_at_step", "trainer.cpu_threads", "actor_rollout_ref.rollout.cpu_threads"}
"""Keys whose values a run or the sweep chooses."""


@dataclass(frozen=True)
class SweptRun:
    """A run of a sweep: one combination of values."""

    module: str
    words: Sequence[str]
    setting: str  # the values without seeds: runs with the same setting are averaged
    config: Config | TuningConfig

    @property
    def name(self) -> str:
        return self.config.trainer.experiment_name

    @property
    def folder(self) -> Path:
        return self.config.trainer.folder

    def is_complete(self, more_words: Sequence[str]) -> bool:
        """Whether the run has finished with its words, or also with more_words, and no value or input has changed."""
        ends = tuple(redact(shlex.join([self.module, *self.words, *more])) for more in (more_words, ()))
        if not any(one.state == "finished" and one.command.endswith(ends) for one in read_history(self.folder)):
            return False
        changed = {change.key for change in find_changes(read_saved_config(self.folder), self.config)}
        same_inputs = read_input_digests(self.folder) == compute_input_digests(self.config)
        return same_inputs and changed <= MAY_CHANGE


class RunProcess:
    """Process of a run, with its GPUs. Its output is appended to a log."""

    def __init__(self, run: SweptRun, more_words: Sequence[str], gpus: Sequence[str]):
        self.run, self.gpus, self.started = run, gpus, time.monotonic()
        self.log = run.folder.parent / "logs" / f"{run.name}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        variables = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
        with self.log.open("ab") as file:
            self._log_start = file.tell()
            self.process = start_run_process(run.module, [*run.words, *more_words], file, variables)

    def describe(self) -> str:
        """Describe what the run does, e.g. `lr=1e-05: update for 0:07, 1:20 left`."""
        state = read_run_state(self.run.folder)
        return f"{self.run.name}: {state.reason if state.name == 'running' else 'starts or ends'}"

    def find_error(self) -> str:
        """Return why the ended run failed; empty if it did not."""
        if not (code := self.process.returncode):
            return ""
        lines = self.log.read_bytes()[self._log_start :].decode(errors="replace").splitlines()
        error = f"ended by signal {-code}" if code < 0 else "interrupted" if code == INTERRUPTED else find_error(lines)
        return shorten_text(" ".join(error.split()), MAX_ERROR)


@dataclass(frozen=True)
class RunQueue:
    """Runs that wait until GPUs are free."""

    gpus: Sequence[str]
    limit: int  # most runs at a time
    terminal: Terminal

    def train(self, runs: Sequence[SweptRun], more_words: Sequence[str]) -> dict[str, str]:
        """Train all runs that are not complete. Returns the errors of those that failed, by name."""
        waiting = [run for run in runs if not run.is_complete(more_words)]
        running, free, errors, shown = list[RunProcess](), [*self.gpus], dict[str, str](), 0.0
        try:
            with self.terminal.status("") as status:
                while waiting or running:
                    for ended in [one for one in running if one.process.poll() is not None]:
                        running.remove(ended)
                        free += ended.gpus
                        errors |= self._report_end(ended)
                    while waiting and len(running) < self.limit:
                        if (needed := count_gpus(waiting[0].config, len(self.gpus))) > len(free):
                            break
                        running.append(RunProcess(waiting.pop(0), more_words, [free.pop(0) for _ in range(needed)]))
                    done = f"{len(runs) - len(waiting) - len(running)} of {len(runs)} done"
                    text = "; ".join([done, *(one.describe() for one in running)])
                    status.update(Text(text))
                    if not self.terminal.is_terminal and time.monotonic() - shown > QUIET_SECONDS:
                        self.terminal.write(text)
                        shown = time.monotonic()
                    time.sleep(POLL_SECONDS)
        except BaseException:
            stop_run_processes([one.process for one in running])
            raise
        return errors

    def _report_end(self, ended: RunProcess) -> dict[str, str]:
        name, error, seconds = ended.run.name, ended.find_error(), format_duration(time.monotonic() - ended.started)
        state = f"failed after {seconds}: {error} (output: {ended.log})" if error else f"finished after {seconds}"
        self.terminal.write(f"{name}: {state}")
        return {name: error} if error else {}


def uses_cluster(config: Config | TuningConfig) -> bool:
    """Whether a run joins the Ray cluster that RAY_ADDRESS names, which assigns GPUs."""
    return bool(os.environ.get("RAY_ADDRESS")) and resolve_controller(config.trainer) == "ray"


def find_gpus(runs: Sequence[SweptRun]) -> list[str]:
    """Return the ids of this machine's GPUs, for CUDA_VISIBLE_DEVICES; none if the runs use no GPU."""
    num_gpus = 0 if all(run.config.trainer.device == "cpu" for run in runs) else detect_machine().num_gpus
    return list_visible_gpus(num_gpus)[:num_gpus]


def count_gpus(config: Config | TuningConfig, num_gpus: int) -> int:
    """Return how many of this machine's GPUs a run needs; 0 on CPUs and in a cluster."""
    is_on_cpu = resolve_device(config.trainer.device, num_gpus) == "cpu"
    return 0 if is_on_cpu or uses_cluster(config) else count_gpus_of_node(config)
