"""The training loop: one iteration reads top to bottom in `train`.

collect groups -> learn (build_batch -> columns from the workers -> assign_credit -> update) -> publish -> on schedule
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np

from alphaapollo.algorithms.mismatch import mismatch_advice, mismatch_metrics
from alphaapollo.controller.crew import Crew
from alphaapollo.observability.timing import Timer
from alphaapollo.schedule import due
from alphaapollo.trainer.collect import collect
from alphaapollo.trainer.reset import reset_is_due
from alphaapollo.trainer.run import Run
from alphaapollo.trainer.step import Batch, WorkerColumns, assign_credit, build_batch
from alphaapollo.trainer.summary import summarize_rollouts
from alphaapollo.trainer.validate import validate
from alphaapollo.types import TrajectoryGroup


async def train(run: Run) -> None:
    """Run the iterations that remain. On any error the last whole checkpoint stands."""
    config, crew, timer = run.config, run.crew, Timer()
    for step in run.progress.remaining(run.total_steps):
        collected = await collect(run, step, timer)
        metrics = summarize_rollouts(collected.generated, timer.seconds["generate"])
        metrics |= {"rollout/rounds": collected.rounds, "rollout/groups_kept": len(collected.groups)}
        metrics |= run.trained_reward.figures() if run.trained_reward else {}
        if collected.groups:
            metrics |= await learn(run, step, collected.groups, timer)
        with timer("publish"):
            metrics |= await run.weights.publish(step)
        run.rollout_log.write(step, collected.generated)
        if due(step, config.trainer.test_freq, run.total_steps):
            with timer("validate"):
                metrics |= await validate_now(run, step)
            metrics |= await memory(crew)
        if reset_is_due(config.algorithm.reference_reset, run.progress, step, metrics.get("val/accuracy")):
            await crew.policy.hard_reset()
            run.console.notice(f"step {step}: the policy is the new reference, and the optimiser starts anew")
        run.progress.kl_coef = run.kl_controller.coef
        metrics |= timer.metrics() | {"reference/resets": run.progress.reference_resets}
        run.tracker.log(step, metrics)
        run.console.step(step, metrics)
        timer = Timer()  # a checkpoint follows its own line, or a kill between them loses that
        if due(step, config.trainer.save_freq, run.total_steps):
            with timer("checkpoint"):
                await save(run, step)


async def learn(run: Run, step: int, groups: list[TrajectoryGroup], timer: Timer) -> dict[str, float]:
    """From groups to the gradient: one iteration's optimiser steps."""
    config, crew, plan = run.config, run.crew, run.plan
    with timer("batch"):
        batch = build_batch(
            groups,
            config.actor_rollout_ref.actor,
            config.algorithm,
            max_length=config.data.max_response_length,
            num_ranks=plan.layout.num_ranks,
            padded=plan.padded,
            run_seed=config.trainer.seed,
            step=step,
        )
    with timer("score"):
        computed = await compute_columns(run, batch)
    with timer("advantage"):
        actor, kl_coef = config.actor_rollout_ref.actor, run.kl_controller.coef
        columns, metrics = assign_credit(batch, computed, run.estimator, config.algorithm, actor, kl_coef)
    with timer("update"):
        run.console.phase("update", 0, 1)
        if crew.critic:
            metrics |= await crew.critic.update(columns)
        if step > config.trainer.critic_warmup:
            metrics |= await crew.policy.update(columns)
            metrics |= await measure_mismatch(run, batch)
        run.console.phase("update", 1, 1)
    if plan.kl_in_reward:
        run.kl_controller.update(metrics["kl/per_sequence"], batch.num_trajectories)
    return metrics


async def compute_columns(run: Run, batch: Batch) -> WorkerColumns:
    """Send the rows down once, and fetch the float columns that the algorithm asks for: often none."""
    policy, critic, plan, layout = run.crew.policy, run.crew.critic, run.plan, batch.layout
    await policy.load_batch(layout.rank_batches)
    if critic:
        await critic.load_batch(layout.rank_batches)
    # Where nobody here needs the old log-probs, the update takes them from its own first pass.
    if run.config.algorithm.rollout_correction.bypass:
        old: list[np.ndarray] | None = [rank.rows.rollout_logprobs for rank in layout.rank_batches]
    else:
        old = await policy.compute_log_probs() if plan.needs_old_logprobs else None
    ref = await policy.compute_ref_log_probs() if plan.needs_ref_columns else None
    values = await critic.compute_values() if critic else None
    return WorkerColumns(
        old_logprobs=None if old is None else layout.to_matrix(old),
        ref_logprobs=None if ref is None else layout.to_matrix(ref),
        values=None if values is None else layout.to_matrix(values),
    )


async def measure_mismatch(run: Run, batch: Batch) -> dict[str, float]:
    """How far engine and trainer are apart, and a line of advice the first time that it is too far."""
    if run.config.algorithm.rollout_correction.bypass:
        return {}  # the old log-probs are the engine's own
    layout = batch.layout
    trainer = layout.to_matrix(await run.crew.policy.old_log_probs())
    engine = layout.to_matrix([rank.rows.rollout_logprobs for rank in layout.rank_batches])
    metrics = mismatch_metrics(trainer, engine, batch.mask.numpy())
    advice = mismatch_advice(metrics)
    if advice and not run.mismatch_told:
        run.console.notice(advice)
        run.mismatch_told = True
    return metrics


async def validate_now(run: Run, step: int) -> dict[str, float]:
    """Validate with the weights that the engines hold, and log every trajectory."""
    if not run.val_prompts:
        return {}
    metrics, groups = await validate(
        run.crew.engines,
        run.val_prompts,
        run.config.actor_rollout_ref.rollout.val_kwargs,
        max_tokens=run.config.data.max_response_length,
        seed=run.config.trainer.seed,
        console=run.console,
        trained_reward=run.trained_reward,
    )
    for suffix, own in groups.items():
        run.rollout_log.write_validation(step, own, suffix)
    return metrics


async def memory(crew: Crew) -> dict[str, float]:
    """GiB, the largest over the ranks of each role: memory/policy_rss_gib, memory/engine_gib, ..."""
    figures = {f"memory/policy_{name}": value for name, value in (await crew.policy.memory()).items()}
    if crew.critic:
        figures |= {f"memory/critic_{name}": value for name, value in (await crew.critic.memory()).items()}
    if crew.reward_model:
        figures |= {f"memory/reward_model_{name}": value for name, value in (await crew.reward_model.memory()).items()}
    return figures | await crew.engines.memory()


async def save(run: Run, step: int) -> None:
    """Write a checkpoint of everything that `step` whole iterations made."""
    folder = run.checkpoints.begin(step)
    await run.crew.policy.save(str(folder / "policy"))
    if run.crew.critic:
        await run.crew.critic.save(str(folder / "critic"))
    replace(run.progress, step=step).write(folder)
    await asyncio.to_thread(run.checkpoints.finish, folder)
