"""Monitoring of a run: required processes and stalls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from alphaapollo.config.schema import Training
from alphaapollo.controller.health.process_monitor import ProcessMonitor
from alphaapollo.controller.health.stall_monitor import StallMonitor, StallSettings
from alphaapollo.controller.worker_groups import WorkerGroups
from alphaapollo.launch.resume import resume_hint


@asynccontextmanager
async def monitor_run(
    workers: WorkerGroups, trainer: Training, notify: Callable[[str], None]
) -> AsyncIterator[Sequence[Callable[[], bool]]]:
    """Wrap a run after the start of its workers, which has a timeout of its own. Raises WorkerDied and RunStalled.

    Yields functions that return whether a monitor has cancelled the block (background_checkpoint.py).
    """
    folder, required = trainer.folder, workers.required_processes
    settings = StallSettings(trainer.stall_notice, trainer.stall_timeout, workers.specs.placement.device, folder)
    processes = ProcessMonitor(required, lambda what: notify(f"{what}{resume_hint(folder)}"))
    stalls = StallMonitor(workers.ranks, settings, notify, lambda: f"stopped{resume_hint(folder)}", required)
    async with processes, stalls:
        yield [processes.has_cancelled_block, stalls.has_cancelled_block]
