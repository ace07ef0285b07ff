"""The training loop. One iteration reads top to bottom in `train` and `finish_iteration`.

collect groups -> learn -> publish the weights -> on schedule: validate, reset the reference, begin a checkpoint

`engines.sleep`, `weights.publish` and `engines.cache_released` hand over shared GPUs (docs/architecture.md).
"""

from __future__ import annotations

import asyncio

from alphaapollo.config.schema import ReferenceReset
from alphaapollo.evaluation.validation import Validation, validate
from alphaapollo.observability.memory import resident_gib
from alphaapollo.observability.timing import Timer
from alphaapollo.trainer.metrics import rollout_metrics, speed_metrics
from alphaapollo.trainer.progress import Progress
from alphaapollo.trainer.replay.record import learn_and_record
from alphaapollo.trainer.run_state import TrainingRun
from alphaapollo.trainer.step.collect import CollectedGroups, collect
from alphaapollo.trainer.step.in_flight import InFlightGroups, staleness_metrics
from alphaapollo.utils.schedule import is_due


async def train(run: TrainingRun) -> None:
    """Run the remaining iterations. If it raises, the last complete checkpoint remains valid."""
    timer = Timer()
    while not run.goal.is_reached(run.progress):
        step = run.progress.step + 1
        await run.profiler.start_step(step, timer)
        collected = await collect(run, step, timer)
        run.saving.begin_update()
        with timer("generate"):
            await run.workers.engines.sleep()
        timer = await finish_iteration(run, collected, timer.seconds["generate"], timer)
    await run.profiler.start_step(None, timer)


async def finish_iteration(
    run: TrainingRun, collected: CollectedGroups, seconds: float, timer: Timer, in_flight: InFlightGroups | None = None
) -> Timer:
    """Train on the groups, publish the weights, log, validate and checkpoint.

    Returns the timer of the next iteration. seconds: duration of the generation.
    """
    config, progress = run.config, run.progress
    step = progress.step + 1
    is_last = run.goal.is_reached(progress, step)
    metrics = rollout_metrics(collected.generated, collected.groups, collected.rounds, seconds)
    metrics |= staleness_metrics(collected.groups, step - 1) if in_flight else {}
    metrics |= collected.recovery
    metrics |= run.reward_model_scorer.take_metrics() if run.reward_model_scorer else {}
    metrics |= run.reference.take_metrics() if run.reference else {}
    run.rollout_log.write(step, collected.generated)
    learned = await learn_and_record(run, step, collected.groups, timer)
    metrics |= learned.metrics
    progress.kl_coef = learned.kl_coef
    with timer("publish"):
        metrics |= await run.weights.publish(step)
    if in_flight:
        in_flight.start(step)
    metrics |= await run_scheduled_work(run, step, is_last, timer)
    progress.step = step
    metrics |= in_flight.take_metrics() if in_flight else {}
    metrics |= await run.saving.metrics() | await run_metrics(run, timer, learned.tokens)
    run.tracker.log(step, metrics)
    run.console.show_step(step, metrics)
    run.saving.end_update(progress)
    timer = Timer()  # metrics are written before the checkpoint: a kill between the two must not lose them
    if is_due(step, config.trainer.save_freq, is_last):
        with timer("checkpoint"):
            await run.saving.save(progress)
    return timer


async def run_scheduled_work(run: TrainingRun, step: int, is_last: bool, timer: Timer) -> dict[str, float]:
    """Validate and reset the reference to the policy if either is due. Returns the validation metrics."""
    config, accuracy, run.progress.validation = run.config, None, {}
    if is_due(step, config.trainer.test_freq, is_last):
        with timer("validate"):
            validation = await validate_and_log(run, step)
        accuracy, run.progress.validation = validation.accuracy, validation.metrics
    if is_reset_due(config.algorithm.reference_reset, run.progress, step, accuracy):
        async with run.workers.engines.cache_released():
            await run.workers.policy.reset_reference_and_optimizer()
            await run.workers.policy.offload()
        run.console.notice(
            f"step {step}: copied the policy to the reference and reset the optimizer state of the policy"
        )
    return run.progress.validation


def is_reset_due(config: ReferenceReset, progress: Progress, step: int, accuracy: float | None) -> bool:
    """Whether ProRL's hard reset (arXiv 2505.24864, section 2.3.1) is due after iteration `step`.

    It is due on schedule, or if validation has stagnated. Updates `progress`, so that a resumed run decides the same.
    accuracy: validation accuracy after this iteration; None if it did not validate.
    """
    if accuracy is not None:
        if progress.best_accuracy is None or accuracy > progress.best_accuracy:
            progress.best_accuracy, progress.validations_without_gain = accuracy, 0
        else:
            progress.validations_without_gain += 1
    on_schedule = config.every is not None and step % config.every == 0
    stagnant = config.patience is not None and progress.validations_without_gain >= config.patience
    if on_schedule or stagnant:
        progress.reference_resets += 1
        progress.validations_without_gain = 0
    return on_schedule or stagnant


async def validate_and_log(run: TrainingRun, step: int) -> Validation:
    """Validate with the current weights of the engines, and log every trajectory."""
    validation = await validate(
        run.workers.engines,
        run.val_prompts,
        run.config.actor_rollout_ref.rollout.val_kwargs,
        max_tokens=run.config.data.max_response_length,
        seed=run.config.trainer.seed,
        console=run.console,
        reward_model_scorer=run.reward_model_scorer,
    )
    for suffix, groups in validation.groups.items():
        run.rollout_log.write_validation(step, groups, suffix)
    run.saving.checkpoints.check_keep_best(validation.metrics)
    return validation


async def run_metrics(run: TrainingRun, timer: Timer, tokens: int) -> dict[str, float]:
    """Compute position in the data, speed, and memory of each role (GiB, maximum over its ranks).

    tokens: number of tokens of the rows trained on.
    """
    workers, progress = run.workers, run.progress
    trainers = {"policy": workers.policy, "critic": workers.critic, "reward_model": workers.reward_model}
    roles = {name: role for name, role in trainers.items() if role}
    engines, *trainer_memory = await asyncio.gather(
        workers.engines.memory(), *(role.memory() for role in roles.values())
    )
    memory = {
        f"memory/{role}_{name}": value
        for role, values in zip(roles, trainer_memory, strict=True)
        for name, value in values.items()
    }
    return {
        "data/epoch": progress.prompts_consumed / run.stream.num_prompts,
        "data/prompts_consumed": float(progress.prompts_consumed),
        "reference/resets": float(progress.reference_resets),
        **engines,
        **memory,
        "memory/driver_rss_gib": resident_gib(),
        **timer.metrics(),
        **speed_metrics(tokens, timer.seconds["update"], timer.elapsed, run.plan.placement.num_gpus),
    }
