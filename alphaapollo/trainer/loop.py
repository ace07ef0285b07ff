"""The training loop: one iteration reads top to bottom in `train`.

collect groups -> learn -> publish the weights -> on schedule: validate, reset the reference, begin a checkpoint

Who holds the GPUs, where engines and trainers share them:

    engines.sleep             from here the trainers: policy, critic and reference, each phase ends with `rest`
    weights.publish           the policy's last phase; from here the engines (weight_sync/publish.py)
    engines.cache_released    a trainer's phase in the engines' time: their weights stay, their caches give way
"""

from __future__ import annotations

import asyncio

from alphaapollo.evaluation.validation import Validation, validate
from alphaapollo.observability.memory import resident_gib
from alphaapollo.observability.timing import Timer
from alphaapollo.trainer.metrics.batch_metrics import speed_metrics
from alphaapollo.trainer.metrics.rollout_metrics import rollout_metrics
from alphaapollo.trainer.replay.record import learn_recorded
from alphaapollo.trainer.run_state import Run
from alphaapollo.trainer.step.collect import collect
from alphaapollo.trainer.step.reference_reset import reset_is_due
from alphaapollo.utils.schedule import due


async def train(run: Run) -> None:
    """Run the iterations that remain. On any error the last whole checkpoint stands."""
    config, crew, progress = run.config, run.crew, run.progress
    timer = Timer()
    while not run.goal.reached(progress):
        step = progress.step + 1
        await run.profiler.turn_to(step, timer)
        collected = await collect(run, step, timer)
        is_last = run.goal.reached(progress, step)
        run.saving.moves()
        with timer("generate"):
            await crew.engines.sleep()
        metrics = rollout_metrics(collected.generated, collected.groups, collected.rounds, timer.seconds["generate"])
        metrics |= collected.recovery
        metrics |= run.trained_reward.figures() if run.trained_reward else {}
        metrics |= run.reference.figures() if run.reference else {}
        run.rollout_log.write(step, collected.generated)
        learned = await learn_recorded(run, step, collected.groups, timer)
        metrics |= learned.metrics
        progress.kl_coef = learned.kl_coef
        progress.note_rewards(collected.generated)
        with timer("publish"):
            metrics |= await run.weights.publish(step)
        metrics |= await on_schedule(run, step, is_last, timer)
        progress.step = step
        metrics |= await run.saving.figures() | await run_metrics(run, timer, learned.tokens)
        run.tracker.log(step, metrics)
        run.console.step(step, metrics)
        run.saving.stands(progress)
        timer = Timer()  # a checkpoint follows its own line, or a kill between them loses that
        if due(step, config.trainer.save_freq, is_last):
            with timer("checkpoint"):
                await run.saving.save(progress)
    await run.profiler.turn_to(None, timer)


async def on_schedule(run: Run, step: int, is_last: bool, timer: Timer) -> dict[str, float]:
    """What follows a publish in some iterations: a validation; the policy becomes the reference. Metrics"""
    config, accuracy, metrics = run.config, None, {}
    if due(step, config.trainer.test_freq, is_last):
        with timer("validate"):
            validation = await validate_now(run, step)
        accuracy, metrics = validation.accuracy, validation.metrics
    if reset_is_due(config.algorithm.reference_reset, run.progress, step, accuracy):
        async with run.crew.engines.cache_released():
            await run.crew.policy.hard_reset()
            await run.crew.policy.rest()
        run.console.notice(f"step {step}: the policy is the new reference, and the optimiser starts anew")
    return metrics


async def validate_now(run: Run, step: int) -> Validation:
    """Validate with the weights that the engines hold, and log every trajectory."""
    validation = await validate(
        run.crew.engines,
        run.val_prompts,
        run.config.actor_rollout_ref.rollout.val_kwargs,
        max_tokens=run.config.data.max_response_length,
        seed=run.config.trainer.seed,
        console=run.console,
        trained_reward=run.trained_reward,
    )
    for suffix, own in validation.groups.items():
        run.rollout_log.write_validation(step, own, suffix)
    return validation


async def run_metrics(run: Run, timer: Timer, tokens: int) -> dict[str, float]:
    """Where the run stands after an iteration that trained on so many tokens, its speed, and the memory of each role in
    GiB, the largest over its ranks."""
    crew, progress = run.crew, run.progress
    trainers = {"policy": crew.policy, "critic": crew.critic, "reward_model": crew.reward_model}
    roles = {name: role for name, role in trainers.items() if role}
    engines, *others = await asyncio.gather(crew.engines.memory(), *(role.memory() for role in roles.values()))
    memory = {
        f"memory/{role}_{name}": value for role, own in zip(roles, others, strict=True) for name, value in own.items()
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
