"""A run that goes on by itself when somebody has died (trainer.max_restarts): what a person would do who gives the same
command again, done in the same command.

run -> a death -> all that the run has started ends -> the newest sound checkpoint is looked for -> run
"""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self, TypeVar

from alphaapollo.config.diff import ChangeRule
from alphaapollo.config.resolve import resolve_controller
from alphaapollo.config.schema import Config, TuningConfig
from alphaapollo.controller.ranks import WorkerLost
from alphaapollo.launch.background_checkpoint import Progress
from alphaapollo.launch.checkpoint_folder import PROGRESS, CheckpointFolder
from alphaapollo.launch.failures import NotRestarted
from alphaapollo.launch.input_checks import find_machine
from alphaapollo.launch.resume import Start, find_start, way_on
from alphaapollo.launch.run_command import run_until_told
from alphaapollo.observability.console import Console
from alphaapollo.utils.watchdog import RUN, end_processes

R = TypeVar("R", bound="Prepared")


class Prepared(Protocol):
    """A run that has passed every check and has started nothing."""

    @property
    def config(self) -> Config | TuningConfig: ...

    @property
    def change_rule(self) -> ChangeRule: ...

    @property
    def progress(self) -> Progress:
        """Of the checkpoint, or of a new run."""
        ...

    def going_on(self, config: Any, start: Start) -> Self:
        """The same run from elsewhere."""
        ...


class Written(NamedTuple):
    """A whole checkpoint."""

    path: str
    when: int  # nanoseconds of the file system's clock


class Restarts:
    """How many restarts a run has left, and whether another one can help."""

    def __init__(self, allowed: int):
        self.allowed, self.made = allowed, 0
        self._last: tuple[int, str] | None = None  # death: in which iteration, of whom

    def refused(self, iteration: int, who: str) -> str:
        """Somebody has died: why there is no restart. Empty: there is one, and it is counted."""
        again = self._last == (iteration, who)
        self._last = iteration, who
        if again:
            return f"this was in iteration {iteration} as the time before, so another restart would not help"
        if self.made == self.allowed:
            return f"trainer.max_restarts={self.allowed} allows no further restart"
        self.made += 1
        return ""


def run_with_restarts(prepared: R, run: Callable[[R, Any], Coroutine[Any, Any, None]]) -> None:
    """Run to the last iteration. Raises NotRestarted after a death that ends the run, and whatever else ends it.

    run: of a prepared run and its progress, which moves with it.
    """
    trainer, folder = prepared.config.trainer, prepared.config.trainer.folder
    restarts, found = Restarts(trainer.max_restarts), _checkpoints(folder)
    while True:
        progress = prepared.progress
        try:
            with nothing_left(prepared.config):
                run_until_told(run(prepared, progress))
            return
        except WorkerLost as error:
            death, what = error, error.what.rstrip(".")
        if reason := restarts.refused(progress.step + 1, death.who):
            raise NotRestarted(f"{what}; {reason}: stopped{way_on(folder)}") from death
        Console().notice(f"{what}; restart {restarts.made} of at most {trainer.max_restarts} (trainer.max_restarts)")
        try:
            prepared = prepare_again(prepared, _checkpoints(folder) - found)
        except ValueError as error:
            raise NotRestarted(f"{what}; and it cannot be restarted: {error}") from death


def prepare_again(prepared: R, own: Set[Written]) -> R:
    """The same run from where it can go on now: from a checkpoint of its own if it has written any (`own`), else as its
    command says. Waits for the nodes of a cluster, as a start does.

    ValueError: no checkpoint can be trusted, or nodes do not come.
    """
    config = own_start(prepared.config, own)
    find_machine(config.trainer)
    start = find_start(config, prepared.change_rule)
    for line in start.lines() or ["begins anew."]:
        print(line, flush=True)
    return prepared.going_on(config, start)


def own_start(config: Config | TuningConfig, own: Set[Written]) -> Config | TuningConfig:
    """How a run goes on with itself: where it began with a checkpoint that it was given, newer ones of another time may
    lie beside its own."""
    trainer = config.trainer
    if not own:
        return config
    if trainer.resume_mode == "resume_path":
        update = {"resume_from_path": max(own, key=lambda one: one.when).path}
    else:
        update = {"resume_mode": "auto"}
    return config.model_copy(update={"trainer": trainer.model_copy(update=update)})


def _checkpoints(folder: Path) -> set[Written]:
    whole = CheckpointFolder(folder / "checkpoints", keep=None).whole()
    return {Written(str(one), (one / PROGRESS).stat().st_mtime_ns) for one in whole if (one / PROGRESS).exists()}


@contextmanager
def nothing_left(config: Config | TuningConfig) -> Iterator[None]:
    """After the block no process of the run that it was is left, and the environment variables are as before: a run
    sets some, for itself and for whom it starts."""
    before = dict(os.environ)
    try:
        yield
    finally:
        run_id = os.environ.get(RUN)
        os.environ.clear()
        os.environ.update(before)
        on_ray = resolve_controller(config.trainer) == "ray"  # else they are our own
        if run_id not in (None, before.get(RUN)) and on_ray:
            end_processes(run_id)
