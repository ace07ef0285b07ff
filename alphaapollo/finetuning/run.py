"""Run a prepared fine-tuning: start the workers, resume, train and export."""

from __future__ import annotations

from functools import partial

from alphaapollo.config.resolve import resolve_controller
from alphaapollo.controller.worker_groups import WorkerSpecs
from alphaapollo.finetuning.loop import train
from alphaapollo.finetuning.prepare import make_run_plan, prepare_run
from alphaapollo.finetuning.task import FinetuningPlan, FinetuningProgress, FinetuningRun
from alphaapollo.launch.session import BackgroundCheckpointWriter, open_session
from alphaapollo.observability.console import Console
from alphaapollo.observability.timing import Timer
from alphaapollo.processes.watchdog import new_run_id
from alphaapollo.runs.checkpoint_folder import CheckpointFolder
from alphaapollo.runs.run_history import NUM_LOGGED, write_examples

__all__ = ["prepare_run", "run"]  # called by launch/command.py


async def run(plan: FinetuningPlan, progress: FinetuningProgress, console: Console) -> None:
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
        console.start(plan.total_steps, progress.step)
        async with open_session(config, plan.start, make_run_plan(plan), specs, Timer(), console) as session:
            model = session.workers.trainer
            keep = (trainer.max_ckpt_to_keep, trainer.keep_best)
            checkpoints = CheckpointFolder(trainer.folder / "checkpoints", *keep, plan.start.inputs)
            writer = BackgroundCheckpointWriter[FinetuningProgress](checkpoints, {"model": model}, console.notify)
            ready = FinetuningRun(plan, model, progress, writer, session.tracker, console)
            for warning in await model.get_logprob_check_warnings():
                console.notify(warning)
            await plan.task.begin_run(ready)
            log_examples(plan)
            if checkpoint := plan.start.checkpoint:
                await model.load(str(checkpoint / "model"))
                console.notify(f"resumed from {checkpoint}")
            await session.train(train(ready), writer)
            await session.export(model)
    finally:
        await plan.task.end_run()


def log_examples(plan: FinetuningPlan) -> None:
    """Write the first examples that the run trains on to examples.jsonl."""
    first = plan.stream.prompt_indices(plan.start.inputs.data_start, min(NUM_LOGGED, plan.stream.num_prompts))
    examples = [plan.task.describe_example(plan.train.examples[index], plan.decode) for index in first]
    write_examples(plan.config.trainer.folder, examples)
