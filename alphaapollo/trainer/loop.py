"""The training loop: one iteration reads top to bottom in `train`.

collect groups -> learn -> publish the weights -> on schedule: validate, reset the reference, write a checkpoint
"""

from __future__ import annotations

import asyncio

from alphaapollo.controller.crew import Crew
from alphaapollo.observability.timing import Timer
from alphaapollo.schedule import due
from alphaapollo.trainer.collect import Collected, collect
from alphaapollo.trainer.learn import learn
from alphaapollo.trainer.reset import reset_is_due
from alphaapollo.trainer.run import Run
from alphaapollo.trainer.summary import summarize_rollouts
from alphaapollo.trainer.trained_reward import TrainedReward
from alphaapollo.trainer.validate import Validation, validate


async def train(run: Run) -> None:
    """Run the iterations that remain. On any error the last whole checkpoint stands."""
    config, crew, progress = run.config, run.crew, run.progress
    timer = Timer()
    while not run.goal.reached(progress):
        step = progress.step + 1
        collected = await collect(run, step, timer)
        is_last = run.goal.reached(progress, step)
        with timer("generate"):
            await crew.engines.sleep()  # the trainer's turn on shared GPUs; only a publish wakes the engines
        metrics = rollout_metrics(collected, run.trained_reward, timer)
        if collected.groups:
            learned = await learn(run, step, collected.groups, timer)
            metrics |= learned.metrics
            progress.kl_coef = learned.kl_coef
        with timer("publish"):
            metrics |= await run.weights.publish(step)
        run.rollout_log.write(step, collected.generated)
        accuracy = None
        if due(step, config.trainer.test_freq, is_last):
            with timer("validate"):
                validation = await validate_now(run, step)
            accuracy = validation.accuracy
            metrics |= validation.metrics | await memory(crew)
        if reset_is_due(config.algorithm.reference_reset, progress, step, accuracy):
            await crew.policy.hard_reset()
            run.console.notice(f"step {step}: the policy is the new reference, and the optimiser starts anew")
        progress.step = step
        metrics |= timer.metrics() | {"reference/resets": progress.reference_resets}
        run.tracker.log(step, metrics)
        run.console.step(step, metrics)
        timer = Timer()  # a checkpoint follows its own line, or a kill between them loses that
        if due(step, config.trainer.save_freq, is_last):
            with timer("checkpoint"):
                await save(run)


def rollout_metrics(collected: Collected, trained_reward: TrainedReward | None, timer: Timer) -> dict[str, float]:
    metrics = summarize_rollouts(collected.generated, timer.seconds["generate"])
    metrics |= {"rollout/rounds": collected.rounds, "rollout/groups_kept": len(collected.groups)}
    return metrics | (trained_reward.figures() if trained_reward else {})


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


async def memory(crew: Crew) -> dict[str, float]:
    """GiB, the largest over the ranks of each role: memory/policy_rss_gib, memory/engine_gib, ..."""
    figures = {f"memory/policy_{name}": value for name, value in (await crew.policy.memory()).items()}
    if crew.critic:
        figures |= {f"memory/critic_{name}": value for name, value in (await crew.critic.memory()).items()}
    if crew.reward_model:
        figures |= {f"memory/reward_model_{name}": value for name, value in (await crew.reward_model.memory()).items()}
    return figures | await crew.engines.memory()


async def save(run: Run) -> None:
    """Write a checkpoint of everything that the whole iterations so far made."""
    folder = run.checkpoints.begin(run.progress.step)
    await run.crew.policy.save(str(folder / "policy"))
    if run.crew.critic:
        await run.crew.critic.save(str(folder / "critic"))
    run.progress.write(folder)
    await asyncio.to_thread(run.checkpoints.finish, folder)
