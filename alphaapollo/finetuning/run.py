"""Run a prepared fine-tuning: start the workers, resume, train and export."""

from __future__ import annotations

from functools import partial

from alphaapollo.config.resolve import resolve_controller
from alphaapollo.controller.worker_groups import WorkerSpecs
from alphaapollo.finetuning.loop import train
from alphaapollo.finetuning.prepare import prepare_run
from alphaapollo.finetuning.task import FinetuningPlan, FinetuningProgress, FinetuningRun
from alphaapollo.launch.background_checkpoint import BackgroundCheckpointWriter
from alphaapollo.launch.checkpoint_folder import CheckpointFolder
from alphaapollo.launch.session import open_session
from alphaapollo.observability.timing import Timer
from alphaapollo.utils.watchdog import new_run_id

__all__ = ["prepare_run", "run"]  # called by launch/command.py


async def run(plan: FinetuningPlan, progress: FinetuningProgress) -> None:
    """Train from `progress` to the last step, export the model, and end all started processes."""
    config, trainer = plan.config, plan.config.trainer
    build = partial(
        plan.task.worker_class,
        config,
        plan.model,
        optimizer_steps=plan.total_steps,
        saves_in_background=plan.memory is None or plan.memory.saves_in_background,
    )
    run_id = new_run_id() if resolve_controller(trainer) == "ray" else ""
    specs = WorkerSpecs(placement=plan.placement, run_id=run_id, rank_builders={"trainer": build})
    try:
        async with open_session(config, plan.start, specs, (progress.step, plan.total_steps), Timer()) as session:
            model, console = session.workers.trainer, session.console
            checkpoints = CheckpointFolder(trainer.folder / "checkpoints", trainer.max_ckpt_to_keep, trainer.keep_best)
            saving = BackgroundCheckpointWriter[FinetuningProgress](checkpoints, {"model": model}, console.notify)
            ready = FinetuningRun(plan, model, progress, saving, session.tracker, console)
            for warning in await model.get_logprob_check_warnings():
                console.notify(warning)
            await plan.task.begin_run(ready)
            if checkpoint := plan.start.checkpoint:
                await model.load(str(checkpoint / "model"))
                console.notify(f"resumed from {checkpoint}")
            await session.train(train(ready), saving)
            await session.export(model, saving)
    finally:
        await plan.task.end_run()
