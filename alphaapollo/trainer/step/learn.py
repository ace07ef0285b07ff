"""Update policy and critic on the rollout groups of one iteration.

groups -> build_batch -> log-probs and values from the workers -> assign_credit -> critic update -> policy update

On shared GPUs, only one model is on the GPU at a time: the policy for log-probs, then the critic, then the policy.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from alphaapollo.algorithms.advantages.gae import next_baseline
from alphaapollo.algorithms.kl import next_kl_coef, next_policy_kl_coef
from alphaapollo.algorithms.mismatch import mismatch_metrics
from alphaapollo.batching.batch import Columns
from alphaapollo.batching.packing import filter_mini_batches
from alphaapollo.models.train_state import MAX_SKIPPED_STEPS
from alphaapollo.observability.timing import Timer
from alphaapollo.runs.rollout_log import TrainedRow
from alphaapollo.trainer.metrics import compute_batch_metrics
from alphaapollo.trainer.run_state import LearnerState, TrainingRun
from alphaapollo.trainer.step.credit import AssignedCredit, assign_credit, describe_non_finite
from alphaapollo.trainer.step.distillation import compute_target_columns
from alphaapollo.trainer.step.training_batch import TrainingBatch, build_batch, is_trainable
from alphaapollo.types import TrajectoryGroup


@dataclass(frozen=True)
class UpdateResult:
    """Result of one iteration's optimizer steps."""

    metrics: dict[str, float]
    kl_coef: float  # coefficient of the KL penalty in the reward, for the next iteration
    trained_tokens: int = 0  # tokens of all sequences trained on, prompts included
    batch: TrainingBatch | None = None  # None: there were no groups
    credit: AssignedCredit | None = None  # None: there were no groups
    is_trained: np.ndarray | None = None  # bool [B] rows that the policy was trained on; None: it was not trained
    old_logprobs: list[np.ndarray] = field(default_factory=list)  # per rank, if the update returned them
    iterations_skipped: int = 0  # consecutive iterations skipped because of non-finite columns, with this one
    policy_kl_coef: float | None = None  # new value of Progress.policy_kl_coef; None: unchanged
    baseline: float | None = None  # new value of Progress.baseline; None: unchanged

    def list_trained_rows(self) -> list[TrainedRow]:
        """Return the log-probs before the update and the advantages of the B rows of the batch.

        If the update computed the log-probs, it did so only for the rows that it trained on.
        """
        batch, credit = self.batch, self.credit
        if batch is None or credit is None:
            return []
        known = [rank.old_logprobs for rank in credit.columns if rank.old_logprobs is not None]
        has_logprobs = np.ones(len(batch.rows), dtype=bool) if known or self.is_trained is None else self.is_trained
        old = known or self.old_logprobs
        logprobs = batch.layout.join_columns(old).astype(np.float32, copy=False) if old else None
        columns = [rank.advantages for rank in credit.columns if rank.advantages is not None]
        advantages = batch.layout.join_columns(columns).astype(np.float32, copy=False)
        identities = [
            (trajectory.prompt_id, trajectory.sample, number)
            for trajectory in batch.trajectories
            for number in range(len(trajectory.rows))
        ]
        spans = pairwise(batch.layout.response_offsets)
        return [
            TrainedRow(*name, logprobs[start:end] if logprobs is not None and computed else None, advantages[start:end])
            for name, computed, (start, end) in zip(identities, has_logprobs, spans, strict=True)
        ]


LearnFunction = Callable[[TrainingRun, int, list[TrajectoryGroup], Timer], Awaitable[UpdateResult]]
"""`learn`, or `learn` with a recorder around it."""


async def learn(run: LearnerState, iteration: int, groups: list[TrajectoryGroup], timer: Timer) -> UpdateResult:
    """Run the optimizer steps of an iteration on the rollout groups. Does nothing if there are none."""
    config, workers, plan, coef = run.config, run.workers, run.plan, run.progress.kl_coef
    if not groups:
        return UpdateResult({}, coef, iterations_skipped=run.progress.iterations_skipped)
    with timer("batch"):
        limits = plan.placement.data_parallel_size, plan.max_tokens, plan.padded
        batch = build_batch(groups, config, iteration, *limits, run.uses_shared_prompts)
    with timer("columns"):
        computed = await compute_logprobs_and_values(run, batch)
    if error := describe_non_finite(computed, batch.mask, batch.layout.response_offsets):
        return await _skip_iteration(run, iteration, error)
    with timer("advantage"):
        credit = assign_credit(batch, computed, config, coef, run.column_dtype, run.progress.baseline or 0.0)
    num_excluded_trajectories = sum(not is_trainable(one) for group in groups for one in group.trajectories)
    metrics = compute_batch_metrics(batch.layout, plan.padded, num_excluded_trajectories, len(batch.trajectories))
    metrics = credit.metrics | metrics
    is_trained: np.ndarray | None = None
    old_logprobs: list[np.ndarray] = []
    options, policy_kl_coef = config.actor_rollout_ref.actor.policy_loss, None
    with timer("update"):
        skip_bad_step = config.trainer.on_bad_step == "skip"
        if workers.critic:
            metrics |= await workers.critic.update(credit.columns, skip_bad_step)
            await workers.critic.offload()
        if iteration > config.trainer.critic_warmup:
            skips_rows = plan.skips_rows_without_advantage
            is_trained = credit.has_gradient if skips_rows else np.ones_like(credit.has_gradient)
            steps = filter_mini_batches(batch.layout, is_trained, plan.max_tokens, plan.padded)
            measures_entropy = iteration % config.actor_rollout_ref.actor.entropy_freq == 0
            # Without trained rows, the trainer computes no old log-probs either.
            measures_mismatch = bool(is_trained.any()) and not plan.uses_rollout_logprobs
            penalty = run.progress.policy_kl_coef if options.adapts_kl_coef else None
            updated, mismatch_sums, old_logprobs = await workers.policy.update(
                credit.columns, steps, skip_bad_step, measures_entropy, measures_mismatch, penalty
            )
            metrics |= updated | {"batch/rows_skipped": 1 - float(is_trained.mean())}
            metrics |= mismatch_metrics(mismatch_sums) if mismatch_sums else {}
            if config.algorithm.use_kl_in_reward:
                kl = credit.metrics["actor/reward_kl_penalty_per_sequence"]
                coef = next_kl_coef(config.algorithm.kl_ctrl, coef, kl, len(batch.trajectories))
            if options.adapts_kl_coef and not updated["actor/steps_skipped"]:  # else the KL is not that of an update
                policy_kl_coef = next_policy_kl_coef(options, penalty, updated["actor/policy_kl"])
    return UpdateResult(
        metrics,
        coef,
        batch.layout.num_tokens,
        batch,
        credit,
        is_trained,
        old_logprobs,
        policy_kl_coef=policy_kl_coef,
        baseline=next_baseline(config.algorithm, run.progress.baseline, credit.mean_return),
    )


async def _skip_iteration(run: LearnerState, iteration: int, error: str) -> UpdateResult:
    """Skip the update of an iteration with non-finite log-probs or values, and print a notice.

    Raises FloatingPointError if trainer.on_bad_step=stop, or after too many consecutive skipped iterations.
    """
    may_skip, skipped_before = run.config.trainer.on_bad_step == "skip", run.progress.iterations_skipped
    if not may_skip or skipped_before + 1 == MAX_SKIPPED_STEPS:
        fix = "" if may_skip else ", or trainer.on_bad_step=skip, which skips such iterations"
        raise FloatingPointError(
            f"the batch of iteration {iteration}, after {skipped_before} skipped ones, cannot be trained on: {error}. "
            f"A resumed run would fail on the same batch. Add data.seed={1000 + iteration} (other batches) or "
            f"actor_rollout_ref.model.dtype=float32 to the command{fix}."
        )
    run.console.notify(f"step {iteration}: {error}. The update is skipped (trainer.on_bad_step=skip)")
    if run.workers.critic:
        await run.workers.critic.offload()
    return UpdateResult({"batch/left_out": 1.0}, run.progress.kl_coef, iterations_skipped=skipped_before + 1)


async def compute_logprobs_and_values(run: LearnerState, batch: TrainingBatch) -> Columns[np.ndarray]:
    """Send the batch to the workers, which compute the log-probs and values that the algorithm needs (often none)."""
    config, policy, critic, layout = run.config, run.workers.policy, run.workers.critic, batch.layout
    await policy.load_batch(layout.rank_batches)
    if critic:
        await critic.load_batch(layout.rank_batches)
    # If the driver does not need the old log-probs, the update computes them in its first forward pass.
    if run.plan.uses_rollout_logprobs:
        old: list[np.ndarray] | None = [rank.rows.rollout_logprobs for rank in layout.rank_batches]
    else:
        old = await policy.compute_log_probs() if run.plan.needs_old_logprobs else None
    ref = await policy.compute_log_probs("reference") if config.needs_ref_log_probs else None
    target = await compute_target_columns(run, batch)
    if critic:
        await policy.offload()
    values = await critic.compute_values() if critic else None
    columns = {"old_logprobs": old, "ref_logprobs": ref, "values": values}
    return replace(target, **{name: layout.join_columns(parts) for name, parts in columns.items() if parts is not None})
