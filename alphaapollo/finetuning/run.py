"""Run a planned fine-tuning: start the workers, resume, train, export, close."""

from __future__ import annotations

from functools import partial

from alphaapollo.config.resolve import resolve_controller
from alphaapollo.controller.worker_groups import WorkerSpecs
from alphaapollo.finetuning.loop import train
from alphaapollo.finetuning.prepare import prepare
from alphaapollo.finetuning.task import FinetuningPlan, FinetuningRun, Progress
from alphaapollo.launch.background_checkpoint import BackgroundCheckpoint
from alphaapollo.launch.checkpoint_folder import CheckpointFolder
from alphaapollo.launch.session import open_session
from alphaapollo.observability.timing import Timer
from alphaapollo.utils.watchdog import new_run_id

__all__ = ["prepare", "run"]  # called by launch/command.py


async def run(plan: FinetuningPlan, progress: Progress) -> None:
    """Train to the last step, and end all started processes. Updates `progress` in place."""
    config, trainer = plan.config, plan.config.trainer
    build = partial(
        plan.task.worker,
        config,
        plan.model,
        optimizer_steps=plan.total_steps,
        saves_in_background=plan.saves_in_background,
    )
    run_id = new_run_id() if resolve_controller(trainer) == "ray" else ""
    specs = WorkerSpecs(placement=plan.placement, run_id=run_id, ranks={"trainer": build})
    try:
        async with open_session(config, plan.start, specs, (progress.step, plan.total_steps), Timer()) as session:
            model, console = session.workers.trainer, session.console
            checkpoints = CheckpointFolder(trainer.folder / "checkpoints", trainer.max_ckpt_to_keep, trainer.keep_best)
            saving = BackgroundCheckpoint[Progress](checkpoints, {"model": model}, console.notice)
            ready = FinetuningRun(plan, model, progress, saving, session.tracker, console)
            for warning in await model.self_check_warnings():
                console.notice(warning)
            await plan.task.begin(ready)
            if checkpoint := plan.start.checkpoint:
                await model.load(str(checkpoint / "model"))
                console.notice(f"resumed from {checkpoint}")
            await session.train(train(ready), saving)
            await session.export(model, saving)
    finally:
        await plan.task.end()
