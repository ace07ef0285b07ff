"""Run a command that has a run folder: lock the folder, handle signals, return the exit code.

After the death of a worker, a training command restarts (trainer.max_restarts), as if the user ran it again:
run -> a worker dies -> kill every process of the run -> find the newest undamaged checkpoint -> run
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import FrameType
from typing import Any, TypeVar

from alphaapollo.config.errors import report_error
from alphaapollo.config.resolve import resolve_controller
from alphaapollo.config.schema import Config, TuningConfig
from alphaapollo.config.schema.trainer import RunSettings
from alphaapollo.controller.ranks import WorkerLost
from alphaapollo.launch.failures import REPORTED_ERRORS, RestartRefused
from alphaapollo.launch.input_checks import detect_node_resources
from alphaapollo.observability.console import Console
from alphaapollo.processes.folder_lock import FolderInUseError, lock_folder
from alphaapollo.processes.watchdog import RUN, kill_run_processes
from alphaapollo.runs.checkpoint_folder import RunProgress, list_checkpoints, parse_step
from alphaapollo.runs.resume import find_start_point, resume_hint
from alphaapollo.utils.heartbeat import HEARTBEAT

T = TypeVar("T")


def run_in_locked_folder(
    trainer: RunSettings,
    console: Console,
    prepare: Callable[[], T],
    run: Callable[[T], None],
    show_end: Callable[[], None],
    make_resume_hint: Callable[[], str],
) -> int:
    """Lock the run's folder, call `prepare`, and call `run` with the result. A dry run only prepares, without a lock.

    The console is closed before an error is printed. show_end: prints what a run has changed, however it ended.
    Returns the exit code: 0 done, 1 failed, 2 refused because `prepare` raised ValueError or another process uses the
    folder, 130 interrupted.
    """
    is_prepared = False
    try:
        with console, nullcontext() if trainer.dry_run else lock_folder(trainer.folder):
            with HEARTBEAT.record_call("prepare"):
                prepared = prepare()
            if trainer.dry_run:
                console.show_line("dry run: the configuration is valid, nothing was started.")
                return 0
            is_prepared = True
            try:
                run(prepared)
            finally:
                show_end()
    except FolderInUseError as error:
        return report_error(error, 2)
    except KeyboardInterrupt:
        print(f"\ninterrupted; {make_resume_hint()}", file=sys.stderr)
        return 130
    except REPORTED_ERRORS as error:
        if is_prepared and (hint := make_resume_hint()) not in str(error):
            print(hint)
        return report_error(error, 1 if is_prepared or not isinstance(error, ValueError) else 2)
    return 0


def run_coroutine(coroutine: Coroutine[object, object, None]) -> None:
    """Run a coroutine like asyncio.run. After SIGINT, raise KeyboardInterrupt instead of WorkerLost, because the signal
    often ends the workers, too."""
    was_signalled = False

    async def await_coroutine_and_watch_sigint() -> None:
        handler = signal.getsignal(signal.SIGINT)  # asyncio's: it cancels this task

        def forward_signal(number: int, frame: FrameType | None) -> None:
            nonlocal was_signalled
            was_signalled = True
            assert callable(handler)
            handler(number, frame)

        signal.signal(signal.SIGINT, forward_signal)
        try:
            await coroutine
        finally:
            signal.signal(signal.SIGINT, handler)

    try:
        asyncio.run(await_coroutine_and_watch_sigint())
    except WorkerLost as death:
        if was_signalled:
            raise KeyboardInterrupt from death
        raise


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
            with HEARTBEAT.record_call("restart"):
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
