"""Automatic restarts after the death of a worker (trainer.max_restarts), equivalent to running the same command again.

run -> a death -> end every process of the run -> find the newest undamaged checkpoint -> run
"""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Iterator, Set
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from alphaapollo.config.resolve import resolve_controller
from alphaapollo.config.schema import Config, TuningConfig
from alphaapollo.controller.ranks import WorkerLost
from alphaapollo.launch.checkpoint_folder import PROGRESS, CheckpointFolder, RunProgress
from alphaapollo.launch.failures import RestartRefused
from alphaapollo.launch.input_checks import find_machine
from alphaapollo.launch.resume import find_start, resume_hint
from alphaapollo.launch.run_command import run_until_signal
from alphaapollo.observability.console import Console
from alphaapollo.utils.watchdog import RUN, end_processes

R = TypeVar("R", bound="RestartableRun")


class RestartableRun(Protocol):
    """A dataclass with `config` and `start`: a run that has passed every check and has started nothing."""

    @property
    def config(self) -> Config | TuningConfig: ...

    @property
    def progress(self) -> RunProgress:
        """Progress of the checkpoint, or of a new run."""
        ...


class SavedCheckpoint(NamedTuple):
    path: str
    time: int  # nanoseconds of the file system's clock


class RestartBudget:
    """Number of restarts of a run, and whether another one can help."""

    def __init__(self, allowed: int):
        self.allowed, self.made = allowed, 0
        self._last: tuple[int, str] | None = None  # iteration and role of the last death

    def refuse(self, iteration: int, role: str) -> str:
        """Count a restart after a death in this role. Returns why there is no restart; empty: there is one."""
        is_repeated = self._last == (iteration, role)
        self._last = iteration, role
        if is_repeated:
            return f"the last death was in iteration {iteration}, too, so another restart would not help"
        if self.made == self.allowed:
            return f"trainer.max_restarts={self.allowed} allows no further restart"
        self.made += 1
        return ""


def run_with_restarts(prepared: R, run: Callable[[R, Any], Coroutine[Any, Any, None]]) -> None:
    """Run to the last iteration. RestartRefused: a death ended the run.

    run: takes the prepared run and its progress, which it updates.
    """
    trainer, folder = prepared.config.trainer, prepared.config.trainer.folder
    budget, found = RestartBudget(trainer.max_restarts), _checkpoints(folder)
    while True:
        progress = prepared.progress
        try:
            with clean_up_processes(prepared.config):
                run_until_signal(run(prepared, progress))
            return
        except WorkerLost as error:
            death, cause = error, error.cause.rstrip(".")
        if reason := budget.refuse(progress.step + 1, death.role):
            raise RestartRefused(f"{cause}; {reason}: stopped{resume_hint(folder)}") from death
        Console().notice(f"{cause}; restart {budget.made} of at most {trainer.max_restarts} (trainer.max_restarts)")
        try:
            prepared = prepare_restart(prepared, _checkpoints(folder) - found)
        except ValueError as error:
            raise RestartRefused(f"{cause}; and it cannot be restarted: {error}") from death


def prepare_restart(prepared: R, own: Set[SavedCheckpoint]) -> R:
    """The same run from its newest checkpoint (`own`), or as its command says if it has written none. Waits for the
    nodes of a cluster, as a start does.

    Raises:
        ValueError: every checkpoint is damaged, or nodes are missing.
    """
    config = with_own_checkpoint(prepared.config, own)
    find_machine(config.trainer)
    start = find_start(config)
    for line in start.lines() or ["starts from scratch."]:
        print(line, flush=True)
    return cast(R, replace(cast(Any, prepared), config=config, start=start))


def with_own_checkpoint(config: Config | TuningConfig, own: Set[SavedCheckpoint]) -> Config | TuningConfig:
    """Configuration with which a run resumes from its own checkpoint. A run that began with a given checkpoint may have
    newer ones of an earlier run beside its own."""
    trainer = config.trainer
    if not own:
        return config
    if trainer.resume_mode == "resume_path":
        update = {"resume_from_path": max(own, key=lambda one: one.time).path}
    else:
        update = {"resume_mode": "auto"}
    return config.model_copy(update={"trainer": trainer.model_copy(update=update)})


def _checkpoints(folder: Path) -> set[SavedCheckpoint]:
    whole = CheckpointFolder(folder / "checkpoints", keep=None).completed()
    return {
        SavedCheckpoint(str(one), (one / PROGRESS).stat().st_mtime_ns) for one in whole if (one / PROGRESS).exists()
    }


@contextmanager
def clean_up_processes(config: Config | TuningConfig) -> Iterator[None]:
    """After the block, end every process of the run and restore the environment variables, some of which a run sets."""
    before = dict(os.environ)
    try:
        yield
    finally:
        run_id = os.environ.get(RUN)
        os.environ.clear()
        os.environ.update(before)
        on_ray = resolve_controller(config.trainer) == "ray"  # otherwise they are children of this process
        if run_id not in (None, before.get(RUN)) and on_ray:
            end_processes(run_id)
