"""Update policy and critic on the rollout groups of one iteration.

groups -> build_batch -> log-probs and values from the workers -> assign_credit -> critic update -> policy update

On shared GPUs, only one model is on the GPU at a time: the policy for log-probs, then the critic, then the policy.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from alphaapollo.algorithms.adaptive_coefficients import next_baseline, next_kl_coef, next_policy_kl_coef
from alphaapollo.algorithms.mismatch import mismatch_metrics
from alphaapollo.batching.batch import BatchLayout, Columns
from alphaapollo.batching.packing import filter_mini_batches
from alphaapollo.config.schema import Config
from alphaapollo.models.train_state import MAX_SKIPPED_STEPS
from alphaapollo.observability.timing import Timer
from alphaapollo.session.progress import Feedback
from alphaapollo.session.teachers import compute_target_columns
from alphaapollo.trainer.run_state import LearnerState
from alphaapollo.trainer.step.build_batch import build_batch
from alphaapollo.trainer.step.credit import AssignedCredit, assign_credit, describe_non_finite
from alphaapollo.trainer.step.training_batch import TrainingBatch
from alphaapollo.trainer.step.update_result import UpdateResult
from alphaapollo.types import TrajectoryGroup


async def learn(run: LearnerState, iteration: int, groups: list[TrajectoryGroup], timer: Timer) -> UpdateResult:
    """Run the optimizer steps of an iteration on the rollout groups. Does nothing without groups."""
    config, plan, before = run.config, run.plan, run.progress.feedback
    if not groups:
        return UpdateResult({}, before)
    with timer("batch"):
        limits = plan.placement.data_parallel_size, plan.max_tokens, plan.padded
        batch = build_batch(groups, config, iteration, *limits, run.uses_shared_prompts)
    with timer("columns"):
        computed = await compute_logprobs_and_values(run, batch)
    if error := describe_non_finite(computed, batch.mask, batch.layout.response_offsets):
        return await _skip_iteration(run, iteration, error)
    with timer("advantage"):
        credit = assign_credit(batch, computed, config, before.kl_coef, run.column_dtype, before.baseline or 0.0)
    num_trained = len(batch.trajectories)
    metrics = credit.metrics | compute_batch_metrics(batch.layout, plan.padded, batch.others.num_failed, num_trained)
    is_trained: np.ndarray | None = None
    policy_metrics: dict[str, float] | None = None
    old_logprobs: list[np.ndarray] = []
    with timer("update"):
        if critic := run.workers.critic:
            metrics |= await critic.update(credit.columns, config.trainer.on_bad_step == "skip")
            await critic.offload()
        if iteration > config.trainer.critic_warmup:
            is_trained = credit.has_gradient if plan.skips_rows_without_advantage else np.ones_like(credit.has_gradient)
            policy_metrics, old_logprobs = await _update_policy(run, iteration, batch, credit, is_trained)
            metrics |= policy_metrics
    feedback = _compute_feedback(config, before, batch, credit, policy_metrics)
    return UpdateResult(metrics, feedback, batch.layout.num_tokens, batch, credit, is_trained, old_logprobs)


async def _update_policy(
    run: LearnerState, iteration: int, batch: TrainingBatch, credit: AssignedCredit, is_trained: np.ndarray
) -> tuple[dict[str, float], list[np.ndarray]]:
    """Run the policy's optimizer steps on the rows with is_trained [B]. Returns metrics, and the old log-probs of each
    rank if the update computed them."""
    config, plan, actor = run.config, run.plan, run.config.actor_rollout_ref.actor
    steps = filter_mini_batches(batch.layout, is_trained, plan.max_tokens, plan.padded)
    # Without trained rows, the update computes no old log-probs that could be compared with the engine's.
    measures_mismatch = bool(is_trained.any()) and not plan.uses_rollout_logprobs
    skip_bad_step, measures_entropy = config.trainer.on_bad_step == "skip", iteration % actor.entropy_freq == 0
    kl_coef = run.progress.policy_kl_coef if actor.policy_loss.adapts_kl_coef else None
    metrics, mismatch_sums, old_logprobs = await run.workers.policy.update(
        credit.columns, steps, skip_bad_step, measures_entropy, measures_mismatch, kl_coef
    )
    metrics |= {"batch/rows_skipped": 1 - float(is_trained.mean())}
    return metrics | (mismatch_metrics(mismatch_sums) if mismatch_sums else {}), old_logprobs


def _compute_feedback(
    config: Config, before: Feedback, batch: TrainingBatch, credit: AssignedCredit, update: dict[str, float] | None
) -> Feedback:
    """Compute what the next iteration depends on. update: metrics of the policy's update; None without an update."""
    algorithm, options = config.algorithm, config.actor_rollout_ref.actor.policy_loss
    kl_coef, policy_kl_coef = before.kl_coef, before.policy_kl_coef
    if update is not None and algorithm.use_kl_in_reward:
        kl = credit.metrics["actor/reward_kl_penalty_per_sequence"]
        kl_coef = next_kl_coef(algorithm.kl_ctrl, kl_coef, kl, len(batch.trajectories))
    if update is not None and options.adapts_kl_coef and not update["actor/steps_skipped"]:
        policy_kl_coef = next_policy_kl_coef(options, policy_kl_coef, update["actor/policy_kl"])
    baseline = next_baseline(algorithm, before.baseline, credit.mean_return)
    return Feedback(kl_coef, policy_kl_coef, baseline)


async def _skip_iteration(run: LearnerState, iteration: int, error: str) -> UpdateResult:
    """Skip the update of an iteration with non-finite log-probs or values, and print a notice.

    Raises FloatingPointError if trainer.on_bad_step=stop, or after too many consecutive skipped iterations.
    """
    may_skip, before = run.config.trainer.on_bad_step == "skip", run.progress.feedback
    if not may_skip or before.iterations_skipped + 1 == MAX_SKIPPED_STEPS:
        fix = "" if may_skip else ", or trainer.on_bad_step=skip, which skips such iterations"
        raise FloatingPointError(
            f"the batch of iteration {iteration}, after {before.iterations_skipped} skipped ones, cannot be trained "
            f"on: {error}. A resumed run would fail on the same batch. Add data.seed={1000 + iteration} (other "
            f"batches) or actor_rollout_ref.model.dtype=float32 to the command{fix}."
        )
    run.console.notify(f"step {iteration}: {error}. The update is skipped (trainer.on_bad_step=skip)")
    if run.workers.critic:
        await run.workers.critic.offload()
    return UpdateResult({"batch/left_out": 1.0}, replace(before, iterations_skipped=before.iterations_skipped + 1))


async def compute_logprobs_and_values(run: LearnerState, batch: TrainingBatch) -> Columns[np.ndarray]:
    """Send the batch to the workers, which compute the log-probs and values that the algorithm needs (often none)."""
    config, policy, critic, layout = run.config, run.workers.policy, run.workers.critic, batch.layout
    policy.load_batch(layout.rank_batches)
    if critic:
        critic.load_batch(layout.rank_batches)
    # If the driver does not need the old log-probs, the update computes them in its first forward pass.
    if run.plan.uses_rollout_logprobs:
        old: list[np.ndarray] | None = [rank.rows.rollout_logprobs for rank in layout.rank_batches]
    else:
        old = await policy.compute_log_probs() if run.plan.needs_old_logprobs else None
    ref = await policy.compute_log_probs("reference") if config.needs_ref_log_probs else None
    target = await compute_target_columns(config.teacher, policy, run.plan.model, batch.rows, layout)
    if critic:
        await policy.offload()
    values = await critic.compute_values() if critic else None
    columns = {"old_logprobs": old, "ref_logprobs": ref, "values": values}
    return replace(target, **{name: layout.join_columns(parts) for name, parts in columns.items() if parts is not None})


def compute_batch_metrics(batch: BatchLayout, padded: bool, num_failed: int, num_trained: int) -> dict[str, float]:
    """Compute the numbers of trajectories and tokens of a batch, its padding, and the load imbalance of ranks.

    num_failed, num_trained: trajectories that cannot be trained on, and trajectories of the batch.
    """
    loads = [rank.count_computed_tokens(padded=False) for rank in batch.rank_batches]
    cells = batch.count_computed_tokens(padded) if padded else sum(loads)
    return {
        "batch/trajectories": float(num_trained),
        "batch/lost": float(num_failed),
        "batch/rows": float(batch.num_rows),
        "batch/tokens": float(batch.num_tokens),
        "batch/sharing": batch.num_tokens / sum(loads),
        "batch/micro_batches": float(sum(len(step.micro_batches) for step in batch.rank_batches[0].mini_batches)),
        "batch/padding": 1 - sum(loads) / cells,
        "batch/rank_imbalance": max(loads) * len(loads) / sum(loads) - 1,
    }
