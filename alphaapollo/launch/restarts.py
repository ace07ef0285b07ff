"""Restart a run after the death of a worker (trainer.max_restarts), as if the user ran the same command again.

run -> a worker dies -> kill every process of the run -> find the newest undamaged checkpoint -> run
"""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from alphaapollo.config.resolve import resolve_controller
from alphaapollo.config.schema import Config, TuningConfig
from alphaapollo.controller.ranks import WorkerLost
from alphaapollo.launch.checkpoint_folder import RunProgress, list_checkpoints, parse_step
from alphaapollo.launch.failures import RestartRefused
from alphaapollo.launch.input_checks import detect_node_resources
from alphaapollo.launch.resume import find_start_point, resume_hint
from alphaapollo.launch.run_command import run_coroutine
from alphaapollo.observability.console import Console
from alphaapollo.observability.spans import SPANS
from alphaapollo.utils.watchdog import RUN, kill_run_processes


def run_with_restarts(
    prepared_run: Any, run: Callable[[Any, RunProgress, Console], Coroutine[object, object, None]], console: Console
) -> None:
    """Train to the last iteration, with restarts after deaths of workers. Raises RestartRefused if the run cannot be
    restarted.

    prepared_run: dataclass of the checked run, with `config`, `start` (StartPoint) and `progress` (RunProgress).
    run: coroutine function `run(prepared_run, progress, console)` that updates `progress` after each iteration.
    """
    trainer, restarts = prepared_run.config.trainer, 0
    last_death: tuple[int, str] | None = None  # iteration and role of the last death
    while True:
        progress = prepared_run.progress
        try:
            with clean_up_processes(prepared_run.config):
                run_coroutine(run(prepared_run, progress, console))
            return
        except WorkerLost as error:
            death, cause = error, error.cause.rstrip(".")
        iteration, hint = progress.step + 1, resume_hint(trainer.folder)
        if last_death == (iteration, death.role):
            raise RestartRefused(
                f"{cause}; another restart would not help, because the previous death was also in iteration "
                f"{iteration}; {hint}"
            ) from death
        if restarts == trainer.max_restarts:
            raise RestartRefused(
                f"{cause}; trainer.max_restarts={trainer.max_restarts} allows no further restart; {hint}"
            ) from death
        last_death, restarts = (iteration, death.role), restarts + 1
        console.warn(f"{cause}; restart {restarts} of at most {trainer.max_restarts} (trainer.max_restarts)")
        try:
            with SPANS("restart"):
                prepared_run = prepare_restart_from_newest_checkpoint(prepared_run, console)
        except ValueError as error:
            raise RestartRefused(f"{cause}; the run cannot be restarted: {error}") from death


def prepare_restart_from_newest_checkpoint(prepared_run: Any, console: Console) -> Any:
    """Return the run with its newest checkpoint as start point. If the run has written no checkpoint, it starts as it
    did before.

    On a cluster, waits for its nodes. Raises ValueError if every checkpoint is damaged or nodes are missing.
    """
    config, trainer = prepared_run.config, prepared_run.config.trainer
    written = list_checkpoints(trainer.folder)
    if any(parse_step(checkpoint) > prepared_run.start.step for checkpoint in written):  # the start moved later aside
        config = config.model_copy(update={"trainer": trainer.model_copy(update={"resume_mode": "auto"})})
    detect_node_resources(config)
    start = find_start_point(config, prepared_run.start.inputs.digests)  # the files may have changed meanwhile
    for line in start.describe() or ["starts from scratch."]:
        console.show_line(line)
    return replace(prepared_run, config=config, start=start)


@contextmanager
def clean_up_processes(config: Config | TuningConfig) -> Iterator[None]:
    """Context manager that kills every process of the run at its end and restores the environment variables."""
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
