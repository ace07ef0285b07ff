"""Validation: the held-out prompts through the same engines, environments and rewards as training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from alphaapollo.config.schema import ValSampling
from alphaapollo.controller.handles import EngineGroup
from alphaapollo.evaluation.figures import Result, join_repeats, mean_figures, most_samples, result_of
from alphaapollo.evaluation.playing import generate
from alphaapollo.observability.console import Console
from alphaapollo.types import GroupRequest, Prompt, Sampling, TrajectoryGroup


class RewardModelScorer(Protocol):
    """trainer/step/reward_model_scorer.py"""

    async def add_to(self, groups: Sequence[TrajectoryGroup]) -> None: ...

    def take_metrics(self) -> dict[str, float]: ...


@dataclass(frozen=True)
class Validation:
    """One look at the held-out prompts."""

    metrics: dict[str, float]
    accuracy: float | None  # sampled; None where nothing could be scored
    groups: dict[str, list[TrajectoryGroup]]  # of each pass by the suffix of its metrics: "", "_greedy"


async def validate(
    engines: EngineGroup,
    prompts: Sequence[Prompt],
    settings: ValSampling,
    max_tokens: int,
    seed: int,
    console: Console,
    reward_model_scorer: RewardModelScorer | None = None,
) -> Validation:
    """val/accuracy (sampled) and, where asked for, val/accuracy_greedy. Without prompts there is nothing.

    The figures are those of main_generation (evaluation/figures.py), without intervals.

    The draws are the same at every validation, so that two of them differ by the weights alone. A failed trajectory
    counts as missing, and the share of them is a metric.
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
        groups[suffix] = await generate(engines, requests, console, "validate")
        if reward_model_scorer:
            await reward_model_scorer.add_to(groups[suffix])
            metrics |= {f"val/{name}{suffix}": value for name, value in reward_model_scorer.take_metrics().items()}
        metrics |= metrics_of_groups(groups[suffix], suffix)
    return Validation(metrics, metrics.get("val/accuracy"), groups)


def metrics_of_groups(groups: Sequence[TrajectoryGroup], suffix: str) -> dict[str, float]:
    """Of all prompts together and, where there are several, of each data source."""
    results = _results(groups, vote=False)
    if most_samples(results) > 1:
        results = _results(groups, vote=True)
    metrics = val_metrics(results, f"val/{{}}{suffix}")
    sources = sorted({result.data_source for result in results})
    if len(sources) > 1:
        for source in sources:
            own = [result for result in results if result.data_source == source]
            metrics |= val_metrics(own, f"val/{source}/{{}}{suffix}")
    return metrics


def _results(groups: Sequence[TrajectoryGroup], vote: bool) -> list[Result]:
    played = [result_of(group.prompt, one, vote) for group in groups for one in group.trajectories]
    return join_repeats(played, [group.prompt for group in groups])


def val_metrics(results: Sequence[Result], name: str) -> dict[str, float]:
    """The metrics of a validation: means over problems with up to n samples each, failed samples left out.

    `name` has a place for the figure's name, e.g. "val/{}_greedy". With n > 1 pass@k for the powers of two, and maj@n.
    """
    n = most_samples(results)
    figures = mean_figures(results, n)
    metrics = {name.format("failed"): sum(result.outcome.failed for result in results) / len(results)}
    if math.isnan(figures["reward"]):
        return metrics
    metrics[name.format("accuracy")] = figures[f"avg@{n}"]
    metrics[name.format("reward")] = figures["reward"]
    metrics[name.format("response_length")] = figures["response_length"]
    if n > 1:
        for figure in [*(f"pass@{2**power}" for power in range(n.bit_length())), f"maj@{n}"]:
            if not math.isnan(figures[figure]):  # no prompt has k samples that did not fail
                metrics[name.format(figure)] = figures[figure]
    return metrics
