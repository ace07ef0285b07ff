"""The training loops. One iteration reads top to bottom in `train` and `finish_iteration`.

generate groups of rollouts -> learn: update the models -> publish: send the weights to the engines
-> on schedule: validate, reset the reference model -> log -> on schedule: save a checkpoint

`session.hand_over`, `session.publish` and `engines.release_kv_cache_temporarily` switch shared GPUs between engines and
trainers: one of them frees its memory before the other one uses it (docs/architecture.md).

`train_async` generates groups for later iterations while an iteration trains. step/collect.py tracks the groups in
flight and limits how many weight versions old they may be. docs/async.md compares the modes:

                trainer.async_mode=carry                           trainer.async_mode=separate
    take        a batch; the other groups are paused               a batch; the other groups continue
    learn       the engines sleep; requests keep their tokens      the engines generate
    publish     paused requests continue with the new weights      pause, load weights, continue
"""

from __future__ import annotations

import time
from dataclasses import replace

from alphaapollo.config.schema import ReferenceReset
from alphaapollo.observability.rollout_metrics import (
    compute_rollout_metrics,
    compute_speed_metrics,
    find_failure_reason,
)
from alphaapollo.observability.timing import Timer, measure_resident_gib
from alphaapollo.rollout.suites import FOLDER
from alphaapollo.session.progress import Progress
from alphaapollo.session.validation import ValidationResult, validate
from alphaapollo.trainer.run_state import TrainingRun
from alphaapollo.trainer.step.check_sampling import measure_sampling
from alphaapollo.trainer.step.collect import CollectedGroups, InFlightGroups, collect_groups
from alphaapollo.trainer.step.update_result import UpdateResult
from alphaapollo.utils.frequency import is_due


async def train(run: TrainingRun) -> None:
    """Train until the run's goal is reached. After an error, the last complete checkpoint remains valid."""
    timer = Timer()
    while not run.goal.is_reached(run.progress):
        iteration = run.progress.step + 1
        await run.profiler.start_step(iteration, timer)
        collected = await collect_groups(run, iteration, timer)
        run.session.checkpoint_writer.mark_models_inconsistent()
        with timer("generate"):
            await run.session.hand_over()
        metrics = log_groups(run, iteration, collected, timer.seconds["generate"])
        with timer("columns"):
            metrics |= await measure_sampling(run, iteration, collected.generated)
        learned = await run.learn(run, iteration, collected.trained, timer)
        learned = log_trained_rows(run, iteration, learned, collected)
        with timer("publish"):
            metrics |= await run.session.publish(iteration)
        timer = await finish_iteration(run, collected, learned, metrics, timer)
    await run.profiler.start_step(None, timer)


async def finish_iteration(
    run: TrainingRun, collected: CollectedGroups, learned: UpdateResult, metrics: dict[str, float], timer: Timer
) -> Timer:
    """Validate, log and save a checkpoint after the weights are published. Returns the timer of the next iteration.

    metrics: metrics of the groups and of the weight sync.
    """
    iteration, trainer = run.progress.step + 1, run.config.trainer
    is_last = run.goal.is_reached(run.progress, iteration)
    validation_metrics = await validate_and_reset_reference_if_due(run, iteration, is_last, timer)
    run.goal.early_stopping.observe(run.progress, validation_metrics)
    is_last = run.goal.is_reached(run.progress, iteration)  # early stopping may end the run
    run.progress.complete_iteration(learned.feedback, validation_metrics, collected.recent)
    metrics |= learned.metrics | validation_metrics
    for source in run.metric_sources:
        metrics |= source.pop_metrics()
    metrics |= compute_run_metrics(run, timer, learned.trained_tokens)
    reason = find_failure_reason(collected.generated) if metrics["outcome/failed"] else ""
    run.session.log(iteration, metrics, reason)
    run.session.checkpoint_writer.mark_models_consistent(run.progress)
    timer = Timer()  # the checkpoint's time is logged by the next iteration, because this one has logged its metrics
    if is_due(iteration, trainer.save_freq, is_last):
        with timer("checkpoint"):
            await run.session.save(run.progress)
    return timer


def log_groups(
    run: TrainingRun, iteration: int, collected: CollectedGroups, generation_seconds: float
) -> dict[str, float]:
    """Log the groups of an iteration, report them to the prompt sampler, and return their metrics."""
    run.sampler.observe(run.progress, collected.generated)
    run.session.rollout_log.write(iteration, collected.generated)
    run.console.show_samples(collected.selected)
    metrics = compute_rollout_metrics(collected.generated, collected.selected, collected.rounds, generation_seconds)
    return metrics | collected.metrics


def log_trained_rows(
    run: TrainingRun, iteration: int, learned: UpdateResult, collected: CollectedGroups
) -> UpdateResult:
    """Write log-probs and advantages of the iteration's own groups to the rollout log. In the batch, these groups
    precede reused groups. Returns the result without the batch, whose memory is then free."""
    rows = learned.list_trained_rows()
    if learned.batch and collected.reused:
        own_ids = {id(trajectory) for group in collected.selected for trajectory in group.trajectories}
        own = [trajectory for trajectory in learned.batch.trajectories if id(trajectory) in own_ids]
        rows = rows[: sum(len(trajectory.rows) for trajectory in own)]
    if rows:
        run.session.rollout_log.write_trained_rows(iteration, rows)
    return replace(learned, batch=None, credit=None, is_trained=None, old_logprobs=[])


async def validate_and_reset_reference_if_due(
    run: TrainingRun, iteration: int, is_last: bool, timer: Timer
) -> dict[str, float]:
    """Validate if due, then copy the policy to the reference model if due. Returns the validation metrics."""
    config, validation = run.config, ValidationResult({}, None, {})
    if is_due(iteration, config.trainer.test_freq, is_last):
        with timer("validate"):
            validation = await validate_and_log(run, iteration)
    if should_reset_reference(config.algorithm.reference_reset, run.progress, iteration, validation.accuracy):
        async with run.workers.engines.release_kv_cache_temporarily():
            await run.workers.policy.reset_reference_and_optimizer()
            await run.workers.policy.offload()
        run.console.notify(
            f"step {iteration}: copied the policy to the reference model and reset the policy's optimizer state"
        )
    return validation.metrics


def should_reset_reference(config: ReferenceReset, progress: Progress, iteration: int, accuracy: float | None) -> bool:
    """Whether to copy the policy to the reference model after an iteration. ProRL, arXiv 2505.24864, section 2.3.1.

    True every `config.every` iterations, or after `config.patience` validations without a better accuracy. Updates
    `progress`, so that a resumed run decides the same. accuracy: of the validation after this iteration, if any.
    """
    if accuracy is not None:
        if progress.best_accuracy is None or accuracy > progress.best_accuracy:
            progress.best_accuracy, progress.validations_without_gain = accuracy, 0
        else:
            progress.validations_without_gain += 1
    is_on_schedule = config.every is not None and iteration % config.every == 0
    is_stagnant = config.patience is not None and progress.validations_without_gain >= config.patience
    if is_on_schedule or is_stagnant:
        progress.reference_resets += 1
        progress.validations_without_gain = 0
    return is_on_schedule or is_stagnant


async def validate_and_log(run: TrainingRun, iteration: int) -> ValidationResult:
    """Validate with the weights that the engines hold, and write the trajectories to rollouts/ and the trackers."""
    validation = await validate(
        run.workers.engines,
        run.val_prompts,
        run.config.actor_rollout_ref.rollout.val_kwargs,
        max_tokens=run.config.data.max_response_length,
        seed=run.config.trainer.seed,
        console=run.console,
        scorer=run.reward_model_scorer and replace(run.reward_model_scorer),  # a copy, which counts separately
    )
    for suffix, groups in validation.groups.items():
        run.session.rollout_log.write(iteration, groups, f"val{suffix}")
        run.session.tracker.log_samples(iteration, groups, suffix)
    validation = replace(validation, metrics=validation.metrics | await run_val_suites(run, iteration))
    run.session.checkpoint_writer.checkpoints.check_keep_best_metric(validation.metrics)
    return validation


async def run_val_suites(run: TrainingRun, iteration: int) -> dict[str, float]:
    """Run the suites of trainer.val_suites with the weights that the engines hold, and return their metrics."""
    suites, folder = run.val_suites, run.config.trainer.folder.absolute() / FOLDER
    if not suites:
        return {}
    run.console.show_phase("suites", 0, len(suites))
    results = await run.workers.engines.run_suites(suites, folder / f"step_{iteration}")
    for failed in filter(lambda result: result.error, results):
        run.console.notify(f"step {iteration}: {failed.suite} failed: {failed.error}")
    return {name: value for result in results for name, value in result.metrics.items()}


def compute_run_metrics(run: TrainingRun, timer: Timer, trained_tokens: int) -> dict[str, float]:
    """Compute metrics of data progress, of training speed, and of each role's memory (GiB, maximum over ranks)."""
    workers, progress = run.workers, run.progress
    roles = {"policy": workers.policy, "critic": workers.critic, "reward_model": workers.reward_model}
    memory = [(f"memory/{role}_", group.memory_metrics) for role, group in roles.items() if group]
    return {
        "data/epoch": progress.prompts_consumed / run.sampler.epoch_size,
        "data/prompts_consumed": float(progress.prompts_consumed),
        "reference/resets": float(progress.reference_resets),
        **workers.engines.memory_metrics,
        **{prefix + name: value for prefix, metrics in memory for name, value in metrics.items()},
        "memory/driver_rss_gib": measure_resident_gib(),
        **timer.metrics(),
        **compute_speed_metrics(trained_tokens, timer.seconds["update"], timer.elapsed, run.plan.placement.num_gpus),
    }


async def train_async(run: TrainingRun) -> None:
    """Train until the run's goal is reached. After an error, the last complete checkpoint remains valid."""
    in_flight = InFlightGroups(run)
    run.metric_sources.append(in_flight)
    timer, batch_time = Timer(), time.perf_counter()  # batch_time: when the last batch was taken
    try:
        while not run.goal.is_reached(run.progress):
            iteration = run.progress.step + 1
            await run.profiler.start_step(iteration, timer)
            collected = await in_flight.take_batch(iteration, timer)
            previous_batch_time, batch_time = batch_time, time.perf_counter()
            run.session.checkpoint_writer.mark_models_inconsistent()
            if run.config.trainer.async_mode == "carry":
                with timer("pause"):
                    await run.session.hand_over(pauses_requests=True)
            metrics = log_groups(run, iteration, collected, batch_time - previous_batch_time)
            learned = await run.learn(run, iteration, collected.trained, timer)
            learned = log_trained_rows(run, iteration, learned, collected)
            with timer("publish"):
                metrics |= await run.session.publish(iteration)
            in_flight.start_groups(iteration)
            timer = await finish_iteration(run, collected, learned, metrics, timer)
        await run.profiler.start_step(None, timer)
    finally:
        await in_flight.close()
