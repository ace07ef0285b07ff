"""Run a planned fine-tuning: start the workers, resume, train, export, close."""

from __future__ import annotations

from typing import Any, TypeVar

from alphaapollo.config.resolve import resolve_controller
from alphaapollo.config.schema import TuningConfig
from alphaapollo.controller.launcher import launch_workers
from alphaapollo.controller.nodes import RUN_FOLDER
from alphaapollo.controller.worker_groups import WorkerGroups, WorkerSpecs
from alphaapollo.data.batch import FinetuningBatch
from alphaapollo.finetuning.loop import train
from alphaapollo.finetuning.progress import Progress
from alphaapollo.finetuning.task import FinetuningPlan, FinetuningRun
from alphaapollo.launch.background_checkpoint import BackgroundCheckpoint
from alphaapollo.launch.checkpoint_folder import CheckpointFolder
from alphaapollo.launch.input_checks import local_paths, missing_cluster
from alphaapollo.launch.monitor import monitor_run
from alphaapollo.observability.console import Console
from alphaapollo.observability.disk import close_all
from alphaapollo.observability.trackers import make_tracker
from alphaapollo.utils.watchdog import new_run_id

C = TypeVar("C", bound=TuningConfig)
E = TypeVar("E")
B = TypeVar("B", bound=FinetuningBatch)


async def run(plan: FinetuningPlan[C, E, B], progress: Progress) -> None:
    """Train from `progress`, which is updated, to the last step. Ends every process that it started."""
    config, trainer, folder = plan.config, plan.config.trainer, plan.config.trainer.folder
    if problem := missing_cluster(trainer):
        raise ValueError(problem)
    moved = plan.start.claim(config)
    console = Console()
    console.start(plan.total_steps, progress.step)
    if moved:
        console.notice(f"the previous run of this name was moved to {moved}")
    tracker = make_tracker(config.model_dump(mode="json"), folder, progress.step, console.notice)
    workers: WorkerGroups | None = None
    try:
        console.phase("start", 0, 1)
        workers = await launch(plan)
        checkpoints = CheckpointFolder(folder / "checkpoints", trainer.max_ckpt_to_keep, trainer.keep_best)
        saving = BackgroundCheckpoint[Progress](checkpoints, {"model": workers.trainer}, console.notice)
        ready = FinetuningRun(plan, workers.trainer, progress, saving, tracker, console)
        async with monitor_run(workers, trainer, console.notice) as lost:
            await begin(ready)
            async with saving.finish_on_exit():
                loop = train(ready)
                await (saving.run_and_save_on_signal(loop, lost) if trainer.save_on_signal else loop)
            await end(ready)
    finally:
        if workers:
            await workers.close()
        await plan.task.end()
        close_all(tracker.close, console.close)


async def launch(plan: FinetuningPlan[C, E, B]) -> WorkerGroups:
    """Start the ranks, in this process or over Ray (trainer.controller)."""
    config, controller = plan.config, resolve_controller(plan.config.trainer)
    build = plan.task.worker_builder(config, plan.model, plan.total_steps, plan.saves_in_background)
    run_id = new_run_id() if controller == "ray" else ""
    specs = WorkerSpecs(placement=plan.counts, run_id=run_id, trainer=build)
    paths = local_paths(config) | {RUN_FOLDER: str(config.trainer.folder / "config.yaml")}
    return await launch_workers(specs, controller, config.trainer.start_timeout, paths)


async def begin(run: FinetuningRun[Any, Any, Any]) -> None:
    """Load the checkpoint."""
    for warning in await run.trainer.self_check_warnings():
        run.console.notice(warning)
    await run.plan.task.begin(run)
    if checkpoint := run.plan.start.checkpoint:
        await run.trainer.load(str(checkpoint / "model"))
        run.console.notice(f"resumed from {checkpoint}")


async def end(run: FinetuningRun[Any, Any, Any]) -> None:
    """Export the model if requested, otherwise print how to do it."""
    trainer, folder = run.plan.config.trainer, run.plan.config.trainer.folder
    if best := run.saving.checkpoints.describe_best():
        run.console.notice(best)
    if trainer.export_hf:
        await run.trainer.export(str(folder / "model"), trainer.export_lora)
        run.console.notice(f"the model is in {folder / 'model'}")
    elif trainer.save_freq > 0:
        run.console.notice(f"to export the model: python -m alphaapollo.trainer.main_export checkpoint={folder}")
