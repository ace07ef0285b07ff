"""Start the workers of a run with their monitors, and a training's folder, tracker and console."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from alphaapollo.config.resolve import resolve_controller
from alphaapollo.config.schema import Config, GenerationConfig, TuningConfig
from alphaapollo.controller.handles import FinetuningGroup, PolicyGroup
from alphaapollo.controller.launcher import launch_workers
from alphaapollo.controller.stall_monitor import StallMonitor, monitor_processes
from alphaapollo.controller.worker_groups import WorkerGroups, WorkerSpecs
from alphaapollo.observability.console import Console
from alphaapollo.observability.timing import Timer
from alphaapollo.observability.trackers import Tracker
from alphaapollo.runs.resume import resume_hint
from alphaapollo.session.checkpoints import BackgroundCheckpointWriter, run_and_save_on_signal
from alphaapollo.session.inputs import explain_missing_cluster, find_local_paths
from alphaapollo.session.prepare import Preparation
from alphaapollo.utils.disk import close_all
from alphaapollo.utils.heartbeat import HEARTBEAT


@dataclass
class TrainingSession:
    """Started workers, console and tracker of a run."""

    config: Config | TuningConfig
    workers: WorkerGroups
    console: Console
    tracker: Tracker

    async def train(self, training: Coroutine[Any, Any, None], writer: BackgroundCheckpointWriter[Any]) -> None:
        """Run the training loop and wait until its last checkpoint is complete."""
        async with writer.finish_on_exit():
            on_signal = self.config.trainer.save_on_signal
            await (run_and_save_on_signal(writer, training) if on_signal else training)

    async def export(self, model: PolicyGroup | FinetuningGroup[Any]) -> None:
        """Export the model if trainer.export_hf is set."""
        trainer = self.config.trainer
        if trainer.export_hf:
            with HEARTBEAT.record_call("export"):
                await model.export(str(trainer.folder / "model"), trainer.export_lora)


@asynccontextmanager
async def open_workers(
    config: Config | TuningConfig | GenerationConfig,
    specs: WorkerSpecs,
    console: Console,
    make_hint: Callable[[], str],
    timer: Timer | None = None,
) -> AsyncIterator[WorkerGroups]:
    """Context manager that starts and monitors the workers, and stops them. make_hint: returns what a message about a
    death or a stall says about resuming."""
    trainer, paths = config.trainer, find_local_paths(config)
    paths |= {"trainer.output_dir": str(trainer.folder / "config.yaml")}
    workers: WorkerGroups | None = None
    try:
        with (timer or Timer())("start"):
            workers = await launch_workers(specs, resolve_controller(trainer), trainer.start_timeout, paths)
        required, device = workers.required_service_processes, specs.placement.device
        stalls = StallMonitor(workers.ranks, trainer, device, console.notify, make_hint, required)
        async with monitor_processes(required, lambda event: console.notify(f"{event}; {make_hint()}")), stalls:
            yield workers
    finally:
        with HEARTBEAT.record_call("stop"):
            if workers:
                await workers.close()


def begin_run_folder(prepared: Preparation) -> None:
    """Save configuration and plan in the run's folder. A previous run that this one replaces is moved aside."""
    if reason := explain_missing_cluster(prepared.config):
        raise ValueError(reason)
    if moved := prepared.start.prepare_folder(prepared.config, prepared.describe()):
        prepared.console.notify(f"the previous run of this name was moved to {moved}")


@asynccontextmanager
async def open_session(prepared: Preparation, specs: WorkerSpecs, timer: Timer) -> AsyncIterator[TrainingSession]:
    """Context manager of a training: prepare the run's folder, start and monitor the workers, and stop them."""
    config, console, folder = prepared.config, prepared.console, prepared.config.trainer.folder
    begin_run_folder(prepared)
    tracker = Tracker(config.model_dump(mode="json"), folder, console.resumed_step or 0, console.notify)
    try:
        async with open_workers(config, specs, console, lambda: resume_hint(folder), timer) as workers:
            yield TrainingSession(config, workers, console, tracker)
    finally:
        close_all(tracker.close)
