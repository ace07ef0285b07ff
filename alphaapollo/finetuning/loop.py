"""Training loop of SFT, preference and reward-model training.

next examples -> one batch per data-parallel rank -> optimizer step -> metrics -> scheduled validation and checkpoint
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from alphaapollo.finetuning.task import FinetuningRun
from alphaapollo.utils.schedule import is_due


async def train(run: FinetuningRun) -> None:
    """Run the remaining optimizer steps of a run. If this raises, the last complete checkpoint remains valid."""
    plan, progress, writer, task = run.plan, run.progress, run.checkpoint_writer, run.plan.task
    trainer, size = plan.config.trainer, plan.config.data.train_batch_size
    val_batches = {source: task.make_batches(examples, plan) for source, examples in plan.val.items()}
    begin, tokens = time.perf_counter(), 0
    while progress.step < plan.total_steps:
        step = progress.step + 1
        is_last = step == plan.total_steps
        indices = plan.stream.prompt_indices(progress.examples_consumed, size)
        batches = task.make_batches([plan.train.examples[index] for index in indices], plan)
        writer.mark_models_inconsistent()
        stepped = await run.trainer.step(batches, trainer.on_bad_step == "skip")
        tokens += sum(int(batch.rows.lengths.sum()) for batch in batches)
        metrics = add_prefix("train", task.compute_metrics(stepped.metric_sums) | stepped.metrics)
        progress.validation = {}
        if is_due(step, trainer.test_freq, is_last):
            progress.validation = await validate(run, val_batches) if val_batches else {}
            progress.validation |= await task.validate(run, step)
            writer.checkpoints.check_keep_best_metric(progress.validation)
            metrics |= progress.validation
        progress.step, progress.examples_consumed = step, progress.examples_consumed + size
        metrics |= writer.pop_metrics()
        if is_last or step % trainer.log_freq == 0 or any(name.startswith("val/") for name in metrics):
            metrics["train/epoch"] = progress.examples_consumed / plan.stream.num_prompts
            metrics["train/tokens_per_second"] = tokens / (time.perf_counter() - begin)
            run.tracker.log(step, metrics)
            run.console.show_step(step, metrics)
        writer.mark_models_consistent(progress)
        if is_due(step, trainer.save_freq, is_last):
            await writer.save(progress)


async def validate(run: FinetuningRun, val_batches: Mapping[str, Sequence[object]]) -> dict[str, float]:
    """Compute metrics of all validation examples and, if there are several files, of each file."""
    compute = run.plan.task.compute_metrics
    sums = {source: await run.trainer.evaluate(batches) for source, batches in val_batches.items()}
    names = dict.fromkeys(name for source_sums in sums.values() for name in source_sums)
    total = {name: sum(source_sums.get(name, 0.0) for source_sums in sums.values()) for name in names}
    metrics = add_prefix("val", compute(total))
    for source, source_sums in sums.items() if len(sums) > 1 else ():
        metrics |= {f"{name}/{source}": value for name, value in add_prefix("val", compute(source_sums)).items()}
    return metrics


def add_prefix(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Add a prefix to all metric names, e.g. for the prefix "train": `{"loss": 1.0}` -> `{"train/loss": 1.0}`."""
    return {f"{prefix}/{name}": value for name, value in metrics.items()}
