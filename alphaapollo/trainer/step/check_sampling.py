"""Check whether an iteration's tokens are samples of the policy (algorithms/surprise.py)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from alphaapollo.algorithms.surprise import NUM_SUMS, compute_z, sum_surprises
from alphaapollo.batching.packing import build_batch_layout
from alphaapollo.observability.sampling_metrics import compare_samples, draw_rows, list_free_rows
from alphaapollo.trainer.run_state import TrainingRun
from alphaapollo.types import TrajectoryGroup
from alphaapollo.utils.seeds import derive_seed


async def measure_sampling(run: TrainingRun, iteration: int, groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Return the metrics `sampling/*` of all groups that an iteration generated, before any is filtered. Empty if the
    tokens are not samples of the policy's own distributions, or the iteration measures no entropies."""
    role, sampling = run.config.actor_rollout_ref, run.plan.sampling
    is_plain = sampling.temperature > 0 and not role.rollout.is_truncated and role.rollout.name != "fake"
    if not is_plain or iteration % role.actor.entropy_freq:
        return {}
    free_rows = [list_free_rows(group, iteration - 1, sampling.temperature) for group in groups]
    rows = draw_rows(free_rows, derive_seed(run.config.trainer.seed, "sampling", iteration))
    if not rows:
        return {}
    limits = run.plan.placement.data_parallel_size, len(rows), run.plan.max_tokens, run.plan.padded
    layout = build_batch_layout(rows, range(len(rows)), *limits)
    run.workers.policy.load_batch(layout.rank_batches)
    sums = {"z": np.zeros(NUM_SUMS), "repetition_z": np.sum([*map(compare_samples, free_rows)], axis=0)}
    for batch, columns in zip(layout.rank_batches, await run.workers.policy.compute_surprises(), strict=True):
        tokens = batch.rows.action_mask != 0
        sums["z"] += sum_surprises(columns[tokens], batch.rows.rollout_logprobs[tokens])
    if not np.isfinite(sums["z"]).all():  # learn() reports non-finite log-probs
        return {}
    earlier_sums = run.progress.sampling
    run_sums = {name: values + np.array(earlier_sums.get(name, 0.0)) for name, values in sums.items()}
    run.progress.sampling = {name: values.tolist() for name, values in run_sums.items()}
    metrics = {f"sampling/{name}": compute_z(values) for name, values in sums.items()}
    return metrics | {f"sampling/run_{name}": compute_z(values) for name, values in run_sums.items()}
