"""From a prepared fine-tuning to its last step and back to an empty machine: start the workers, resume, train, export,
close."""

from __future__ import annotations

import os
from typing import Any, TypeVar

from alphaapollo.config.resolve import resolve_controller
from alphaapollo.config.schema import TuningConfig
from alphaapollo.controller.nodes import RUN_FOLDER
from alphaapollo.controller.tuning_crew import LocalTuning, TuningCrew, TuningPlan
from alphaapollo.data.batch import TunedBatch
from alphaapollo.finetuning.loop import TuningRun, train
from alphaapollo.finetuning.prepare import Prepared
from alphaapollo.finetuning.progress import Progress
from alphaapollo.launch.background_checkpoint import BackgroundCheckpoint
from alphaapollo.launch.checkpoint_folder import CheckpointFolder
from alphaapollo.launch.input_checks import local_paths, missing_cluster
from alphaapollo.launch.monitor import watched
from alphaapollo.observability.console import Console
from alphaapollo.observability.disk import close_all
from alphaapollo.observability.trackers import make_tracker
from alphaapollo.utils.watchdog import new_run_id, start_reaper

C = TypeVar("C", bound=TuningConfig)
E = TypeVar("E")
B = TypeVar("B", bound=TunedBatch)


async def run(prepared: Prepared[C, E, B], progress: Progress) -> None:
    """Train from where the run stands (`progress`, which moves with it) to the last step; every process that was
    started ends with it."""
    config, trainer, folder = prepared.config, prepared.config.trainer, prepared.config.trainer.folder
    if problem := missing_cluster(trainer):
        raise ValueError(problem)
    moved = prepared.start.claim(config)
    console = Console()
    console.start(prepared.total_steps, progress.step)
    if moved:
        console.notice(f"the earlier run of this name lies in {moved}")
    tracker = make_tracker(config.model_dump(mode="json"), folder, progress.step, console.notice)
    workers: TuningCrew[B] | None = None
    try:
        console.phase("start", 0, 1)
        workers = await launch(prepared)
        checkpoints = CheckpointFolder(folder / "checkpoints", trainer.max_ckpt_to_keep, trainer.keep_best)
        saving = BackgroundCheckpoint[Progress](checkpoints, {"model": workers.trainer}, console.notice)
        ready = TuningRun(prepared, workers.trainer, progress, saving, tracker, console)
        async with watched(workers, trainer, prepared.counts.device, console.notice) as lost:
            await begin(ready)
            async with saving.settled():
                loop = train(ready)
                await (saving.guarded(loop, lost) if trainer.save_on_signal else loop)
            await end(ready)
    finally:
        if workers:
            await workers.close()
        await prepared.station.end()
        close_all(tracker.close, console.close)


async def launch(prepared: Prepared[C, E, B]) -> TuningCrew[B]:
    """Start the ranks where trainer.controller says."""
    config = prepared.config
    build = prepared.station.builder(config, prepared.model, prepared.total_steps, prepared.saves_in_background)
    plan = TuningPlan(prepared.counts, build)
    if resolve_controller(config.trainer) == "local":
        return LocalTuning(plan)
    from alphaapollo.controller.ray_crew import start_local_cluster
    from alphaapollo.controller.ray_tuning_crew import launch_ray_tuning

    start_reaper(new_run_id(), [])
    paths: dict[str, str] | None = None
    if not os.environ.get("RAY_ADDRESS"):  # else prepare() has connected
        start_local_cluster()
    else:
        paths = local_paths(config) | {RUN_FOLDER: str(config.trainer.folder / "config.yaml")}
    return await launch_ray_tuning(plan, config.trainer.start_timeout, paths)


async def begin(run: TuningRun[Any, Any, Any]) -> None:
    """Bring the ranks to the state of the checkpoint."""
    for doubt in await run.trainer.self_check_warnings():
        run.console.notice(doubt)
    await run.prepared.station.begin(run)
    if checkpoint := run.prepared.start.checkpoint:
        await run.trainer.load(str(checkpoint / "model"))
        run.console.notice(f"resumed from {checkpoint}")


async def end(run: TuningRun[Any, Any, Any]) -> None:
    """The model, where it is asked for, or how to get it."""
    trainer, folder = run.prepared.config.trainer, run.prepared.config.trainer.folder
    if best := run.saving.checkpoints.describe_best():
        run.console.notice(best)
    if trainer.export_hf:
        await run.trainer.export(str(folder / "model"), trainer.export_lora)
        run.console.notice(f"the model lies in {folder / 'model'}")
    elif trainer.save_freq > 0:
        run.console.notice(f"to write the model: python -m alphaapollo.trainer.main_export checkpoint={folder}")
