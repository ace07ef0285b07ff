"""Checks of how rows were sampled (Row.logprobs, temperature, weight_versions), for ratios to the engine's policy."""

from collections.abc import Sequence

import numpy as np

from alphaapollo.config.schema import Rollout
from alphaapollo.engines.weight_sync.verification import WeightSyncError
from alphaapollo.types import Row, Sampling


def check_engine_log_probs(rows: Sequence[Row], temperature: float, fix: str = "") -> None:
    """Raise ValueError if log-probs of the engine are missing, or at another temperature than the trainer's."""
    fix = fix or "Pass old_logprobs=[...], e.g. log_probs(rows) before a step."
    for number, row in enumerate(rows):
        missing = np.isnan(np.asarray(row.logprobs)[np.asarray(row.action_mask) != 0])
        problem = f"no engine sampled {missing.sum()} of its {len(missing)} trained tokens" if missing.any() else ""
        if row.temperature not in (None, temperature):
            problem = f"temperature {row.temperature:g} of its samples, but rollout.temperature={temperature:g}"
        if problem:
            raise ValueError(f"row {number}: {problem}. {fix}")


def check_first_ratio(rows: Sequence[Row], logprobs: Sequence[np.ndarray], version: int | None, limit: float) -> None:
    """Raise WeightSyncError if weights of `version` sampled all rows, but the trainer's log-probs [T] with these
    weights differ from the engine's by more than `limit` nats in the mean over tokens, or a bit more for few tokens."""
    if any({sampled for sampled, _ in row.weight_versions} != {version} for row in rows):
        return
    mask = np.concatenate([row.action_mask for row in rows]) != 0
    trainer, engine = (np.concatenate(values)[mask] for values in (logprobs, [row.logprobs for row in rows]))
    gap, tolerance = np.abs(trainer - engine).mean(), limit * (1 + 3 / len(engine) ** 0.5)
    if not gap <= tolerance:  # also true if the gap is NaN
        raise WeightSyncError(
            f"the ratio to the engine's policy is not 1 before the first step: mean log-prob of {len(engine)} tokens "
            f"is {trainer.mean():.5g} under the trainer and {engine.mean():.5g} under the engine, with equal weights "
            f"(mean difference {gap:.2g} nats, tolerance {tolerance:.0e}). Train on the rows as they were sampled."
        )


def check_sampling(rollout: Rollout, sampling: Sequence[Sampling]) -> None:
    """Raise ValueError if settings request kept tokens, but an engine with the settings `rollout` returns none."""
    if any(item.returns_kept_tokens for item in sampling) and not rollout.returns_kept_tokens:
        raise ValueError(
            f"returns_kept_tokens=True needs an engine with sampling masks, but rollout.top_p={rollout.top_p:g}, "
            f"top_k={rollout.top_k}, min_p={rollout.min_p:g}, sampling_mask={rollout.sampling_mask}. Set one of the "
            "first three and sampling_mask=auto, or leave it out."
        )
