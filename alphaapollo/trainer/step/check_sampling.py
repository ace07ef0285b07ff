"""Check whether an iteration's tokens are samples of the policy (algorithms/surprise.py)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from alphaapollo.algorithms.surprise import NUM_SUMS, compute_z, sum_repetitions, sum_surprises
from alphaapollo.batching.packing import build_batch_layout
from alphaapollo.trainer.run_state import TrainingRun
from alphaapollo.types import Row, TrajectoryGroup
from alphaapollo.utils.seeds import derive_seed

MAX_TOKENS = 8192  # of the rows whose surprises an iteration measures, with their prompts


async def measure_sampling(run: TrainingRun, iteration: int, groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Return the metrics `sampling/*` of all groups that an iteration generated, before any is filtered. Empty if the
    tokens are not samples of the policy's own distributions, or the iteration measures no entropies."""
    role, sampling = run.config.actor_rollout_ref, run.plan.sampling
    is_plain = sampling.temperature > 0 and sampling.top_p == 1 and sampling.top_k <= 0 and role.rollout.name != "fake"
    if not is_plain or iteration % role.actor.entropy_freq:
        return {}
    free = [list_free_rows(group, iteration - 1, sampling.temperature) for group in groups]
    rows = draw_rows(free, derive_seed(run.config.trainer.seed, "sampling", iteration))
    if not rows:
        return {}
    limits = {"max_tokens": run.plan.max_tokens, "padded": run.plan.padded, "mini_batch_size": len(rows)}
    layout = build_batch_layout(rows, range(len(rows)), run.plan.placement.data_parallel_size, **limits)
    run.workers.policy.load_batch(layout.rank_batches)
    sums = {"z": np.zeros(NUM_SUMS), "repetition_z": sum(map(compare_samples, free), np.zeros(NUM_SUMS))}
    for batch, columns in zip(layout.rank_batches, await run.workers.policy.compute_surprises(), strict=True):
        tokens = batch.rows.action_mask != 0
        sums["z"] += sum_surprises(*columns[tokens].T, batch.rows.rollout_logprobs[tokens])
    earlier = run.progress.sampling
    run.progress.sampling = {name: (one + earlier.get(name, 0.0)).tolist() for name, one in sums.items()}
    metrics = {f"sampling/{name}": compute_z(one) for name, one in sums.items()}
    return metrics | {f"sampling/run_{name}": compute_z(np.array(one)) for name, one in run.progress.sampling.items()}


def list_free_rows(group: TrajectoryGroup, version: int, temperature: float) -> list[list[Row]]:
    """Return the rows of each trajectory that this version's weights sampled at this temperature, unconstrained."""
    return [
        one.rows
        for one in group.trajectories
        if one.rows
        and not any("constrained" in turn.info for turn in one.turns)
        and all(row.temperature in (None, temperature) for row in one.rows)
        and all(found == version for row in one.rows for found, _ in row.weight_versions)
    ]


def draw_rows(groups: Sequence[list[list[Row]]], seed: int) -> list[Row]:
    """Draw rows of MAX_TOKENS, but at least one, regardless of what they contain."""
    rows = [row for group in groups for trajectory in group for row in trajectory]
    drawn = [rows[index] for index in np.random.default_rng(seed).permutation(len(rows))]
    ends = np.cumsum([len(row.token_ids) for row in drawn])
    return drawn[: max(1, int(np.searchsorted(ends, MAX_TOKENS, side="right")))]


def compare_samples(group: Sequence[list[Row]]) -> np.ndarray:
    """Return the sums of repetitions among the first turns of a group whose prompts are equal."""
    starts = [(row, row.response_start, row.turn_ends[0] + 1) for row, *_ in group]
    prompts = [list(row.token_ids[:start]) for row, start, _ in starts]
    turns = [(row.token_ids[start:end], row.logprobs[start:end]) for row, start, end in starts]
    return sum_repetitions([turn for turn, prompt in zip(turns, prompts, strict=True) if prompt == prompts[0]])
