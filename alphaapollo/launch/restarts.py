"""Automatic restarts after the death of a worker (trainer.max_restarts), equivalent to running the same command again.

run -> a worker dies -> kill every process of the run -> find the newest undamaged checkpoint -> run
"""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol, TypeVar, cast

from alphaapollo.config.resolve import resolve_controller
from alphaapollo.config.schema import Config, TuningConfig
from alphaapollo.controller.ranks import WorkerLost
from alphaapollo.launch.checkpoint_folder import CheckpointFolder, RunProgress, parse_step
from alphaapollo.launch.failures import RestartRefused
from alphaapollo.launch.input_checks import find_machine
from alphaapollo.launch.resume import StartPoint, find_start, resume_hint
from alphaapollo.launch.run_command import run_until_signal
from alphaapollo.observability.console import Console
from alphaapollo.utils.watchdog import RUN, kill_run_processes

R = TypeVar("R", bound="RestartableRun")


class RestartableRun(Protocol):
    """Interface of a checked run that has not started: a dataclass with `config` and `start`."""

    @property
    def config(self) -> Config | TuningConfig: ...

    @property
    def start(self) -> StartPoint: ...

    @property
    def progress(self) -> RunProgress:
        """Progress of the checkpoint, or of a new run."""
        ...


def run_with_restarts(prepared: R, run: Callable[[R, Any], Coroutine[Any, Any, None]]) -> None:
    """Run to the last iteration, with restarts. Raises RestartRefused if the run cannot be restarted.

    run: coroutine function of the prepared run and its progress, which it updates.
    """
    trainer, restarts = prepared.config.trainer, 0
    last_death: tuple[int, str] | None = None  # iteration and role of the last death
    while True:
        progress = prepared.progress
        try:
            with clean_up_processes(prepared.config):
                run_until_signal(run(prepared, progress))
            return
        except WorkerLost as error:
            death, cause = error, error.cause.rstrip(".")
        iteration, stopped = progress.step + 1, f"stopped{resume_hint(trainer.folder)}"
        if last_death == (iteration, death.role):
            raise RestartRefused(
                f"{cause}; the last death was in iteration {iteration}, too, so another restart would not help: "
                f"{stopped}"
            ) from death
        if restarts == trainer.max_restarts:
            raise RestartRefused(
                f"{cause}; trainer.max_restarts={trainer.max_restarts} allows no further restart: {stopped}"
            ) from death
        last_death, restarts = (iteration, death.role), restarts + 1
        Console().notice(f"{cause}; restart {restarts} of at most {trainer.max_restarts} (trainer.max_restarts)")
        try:
            prepared = prepare_restart(prepared)
        except ValueError as error:
            raise RestartRefused(f"{cause}; the run cannot be restarted: {error}") from death


def prepare_restart(prepared: R) -> R:
    """Return the run with its newest checkpoint as start point, or its configured start if it has written none.

    Waits for the nodes of a cluster. Raises ValueError if every checkpoint is damaged or nodes are missing.
    """
    config, trainer = prepared.config, prepared.config.trainer
    written = CheckpointFolder(trainer.folder / "checkpoints", keep=None).list_completed()
    if any(parse_step(checkpoint) > prepared.start.step for checkpoint in written):  # the start moved later ones aside
        config = config.model_copy(update={"trainer": trainer.model_copy(update={"resume_mode": "auto"})})
    find_machine(config.trainer)
    start = find_start(config)
    for line in start.lines() or ["starts from scratch."]:
        print(line, flush=True)
    return cast(R, replace(cast(Any, prepared), config=config, start=start))


@contextmanager
def clean_up_processes(config: Config | TuningConfig) -> Iterator[None]:
    """Context manager that afterwards kills every process of the run and restores the environment variables."""
    before = dict(os.environ)
    try:
        yield
    finally:
        run_id = os.environ.get(RUN)
        os.environ.clear()
        os.environ.update(before)
        on_ray = resolve_controller(config.trainer) == "ray"  # otherwise they are children of this process
        if run_id not in (None, before.get(RUN)) and on_ray:
            kill_run_processes(run_id)
