"""Validation on held-out prompts with the engines, environments and rewards of training."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from alphaapollo.config.schema import ValSampling
from alphaapollo.controller.handles import EngineGroup
from alphaapollo.evaluation.metrics import (
    SampleResult,
    join_repeats,
    max_samples_per_problem,
    mean_metrics,
    sample_result,
)
from alphaapollo.observability.console import Console
from alphaapollo.types import GroupRequest, Prompt, Sampling, TrajectoryGroup


class RewardModelScorer(Protocol):
    """Implemented by trainer/step/reward_model_scorer.py."""

    async def add_to(self, groups: Sequence[TrajectoryGroup]) -> None: ...

    def take_metrics(self) -> dict[str, float]: ...


@dataclass(frozen=True)
class Validation:
    """Result of a validation."""

    metrics: dict[str, float]
    accuracy: float | None  # of sampled responses; None if nothing was scored
    groups: dict[str, list[TrajectoryGroup]]  # by metric suffix: "" (sampled), "_greedy"


async def validate(
    engines: EngineGroup,
    prompts: Sequence[Prompt],
    settings: ValSampling,
    max_tokens: int,
    seed: int,
    console: Console,
    reward_model_scorer: RewardModelScorer | None = None,
) -> Validation:
    """Compute val/accuracy (sampled) and, if configured, val/accuracy_greedy. Returns no metrics without prompts.

    Metrics are those of main_generation (evaluation/metrics.py) without intervals. Random draws are the same in every
    validation. Failed trajectories are excluded, and their share is a metric.
    """
    if not prompts:
        return Validation({}, None, {})
    passes = {"": (Sampling(max_tokens, settings.temperature, settings.top_p, settings.top_k, seed), settings.n)}
    if settings.greedy:
        passes["_greedy"] = (Sampling(max_tokens, temperature=0.0, seed=seed), 1)
    metrics: dict[str, float] = {}
    groups: dict[str, list[TrajectoryGroup]] = {}
    for suffix, (sampling, n) in passes.items():
        requests = [GroupRequest(prompt, n, sampling, draw=0, validate=True) for prompt in prompts]
        ended: dict[int, TrajectoryGroup] = {}
        await generate_missing_groups(ended, engines, requests, console, "validate")
        groups[suffix] = [ended[index] for index in range(len(requests))]
        if reward_model_scorer:
            await reward_model_scorer.add_to(groups[suffix])
            metrics |= {f"val/{name}{suffix}": value for name, value in reward_model_scorer.take_metrics().items()}
        metrics |= group_metrics(groups[suffix], suffix)
    return Validation(metrics, metrics.get("val/accuracy"), groups)


async def generate_missing_groups(
    groups: dict[int, TrajectoryGroup],
    engines: EngineGroup,
    requests: Sequence[GroupRequest],
    console: Console,
    phase: str,
    ended: Callable[[TrajectoryGroup], None] | None = None,
) -> None:
    """Run the requests missing in `groups` (by index) and add each group when it ends. ended: called with each
    group."""
    missing = [index for index in range(len(requests)) if index not in groups]
    console.phase(phase, len(groups), len(requests))
    async for position, group in engines.generate([requests[index] for index in missing]):
        groups[missing[position]] = group
        console.phase(phase, len(groups), len(requests))
        if ended:
            ended(group)


def group_metrics(groups: Sequence[TrajectoryGroup], suffix: str) -> dict[str, float]:
    """Metrics of all prompts and, if there are several, of each data source."""
    results = _results(groups, vote=False)
    if max_samples_per_problem(results) > 1:
        results = _results(groups, vote=True)
    metrics = val_metrics(results, f"val/{{}}{suffix}")
    sources = sorted({result.data_source for result in results})
    if len(sources) > 1:
        for source in sources:
            own = [result for result in results if result.data_source == source]
            metrics |= val_metrics(own, f"val/{source}/{{}}{suffix}")
    return metrics


def _results(groups: Sequence[TrajectoryGroup], vote: bool) -> list[SampleResult]:
    played = [sample_result(group.prompt, one, vote) for group in groups for one in group.trajectories]
    return join_repeats(played, [group.prompt for group in groups])


def val_metrics(results: Sequence[SampleResult], name: str) -> dict[str, float]:
    """Compute validation metrics: means over problems with up to n samples each, without failed samples.

    name: template of the metric names, e.g. "val/{}_greedy". With n > 1 also pass@k for powers of two, and maj@n.
    """
    n = max_samples_per_problem(results)
    figures = mean_metrics(results, n)
    metrics = {name.format("failed"): sum(result.outcome.failed for result in results) / len(results)}
    if math.isnan(figures["reward"]):
        return metrics
    metrics[name.format("accuracy")] = figures[f"avg@{n}"]
    metrics[name.format("reward")] = figures["reward"]
    metrics[name.format("response_length")] = figures["response_length"]
    if n > 1:
        for figure in [*(f"pass@{2**power}" for power in range(n.bit_length())), f"maj@{n}"]:
            if not math.isnan(figures[figure]):  # NaN: no prompt has k scored samples
                metrics[name.format(figure)] = figures[figure]
    return metrics
