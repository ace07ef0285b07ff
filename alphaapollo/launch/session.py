"""Start the workers of a training run, with their monitors, the console and the metrics tracker."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from alphaapollo.config.resolve import resolve_controller
from alphaapollo.config.schema import Config, TuningConfig
from alphaapollo.controller.handles import FinetuningGroup, PolicyGroup
from alphaapollo.controller.launcher import launch_workers
from alphaapollo.controller.stall_monitor import StallMonitor, monitor_processes
from alphaapollo.controller.worker_groups import WorkerGroups, WorkerSpecs
from alphaapollo.launch.background_checkpoint import BackgroundCheckpointWriter, run_and_save_on_signal
from alphaapollo.launch.input_checks import explain_missing_cluster, find_local_paths
from alphaapollo.observability.console import Console
from alphaapollo.observability.timing import Timer
from alphaapollo.observability.trackers import Tracker
from alphaapollo.runs.resume import StartPoint, resume_hint
from alphaapollo.runs.run_history import RunPlan
from alphaapollo.utils.disk import close_all
from alphaapollo.utils.heartbeat import HEARTBEAT


@dataclass
class TrainingSession:
    """Started workers, console and tracker of a run."""

    config: Config | TuningConfig
    workers: WorkerGroups
    console: Console
    tracker: Tracker

    async def train(self, training: Coroutine[object, object, None], writer: BackgroundCheckpointWriter[Any]) -> None:
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
async def open_session(
    config: Config | TuningConfig, start: StartPoint, plan: RunPlan, specs: WorkerSpecs, timer: Timer, console: Console
) -> AsyncIterator[TrainingSession]:
    """Context manager that prepares the run's folder, starts and monitors the workers, and stops them. Raises
    WorkerDied or RunStalled. console: its `start` has been called."""
    trainer, folder = config.trainer, config.trainer.folder
    if reason := explain_missing_cluster(config):
        raise ValueError(reason)
    if moved := start.prepare_folder(config, plan):
        console.notify(f"the previous run of this name was moved to {moved}")
    tracker = Tracker(config.model_dump(mode="json"), folder, console.resumed_step or 0, console.notify)
    workers: WorkerGroups | None = None
    try:
        with timer("start"):
            workers = await start_workers(config, specs)
        required, device = workers.required_service_processes, specs.placement.device
        stalls = StallMonitor(workers.ranks, trainer, device, console.notify, lambda: resume_hint(folder), required)
        processes = monitor_processes(required, lambda event: console.notify(f"{event}; {resume_hint(folder)}"))
        async with processes, stalls:
            yield TrainingSession(config, workers, console, tracker)
    finally:
        with HEARTBEAT.record_call("stop"):
            if workers:
                await workers.close()
            close_all(tracker.close)


async def start_workers(config: Config | TuningConfig, specs: WorkerSpecs) -> WorkerGroups:
    """Start the workers as objects of this process or as Ray actors (trainer.controller)."""
    trainer = config.trainer
    paths = find_local_paths(config) | {
        "trainer.output_dir": str(trainer.folder / "config.yaml")
    }  # written by the driver
    return await launch_workers(specs, resolve_controller(trainer), trainer.start_timeout, paths)
