"""Validation on held-out prompts with the engines, environments and rewards of training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from alphaapollo.config.schema import ValSampling
from alphaapollo.controller.engine_group import EngineGroup
from alphaapollo.observability.console import Console
from alphaapollo.observability.sample_metrics import (
    SampleResult,
    compute_mean_metrics,
    convert_to_sample_result,
    count_max_samples_per_problem,
    merge_repeated_prompts,
)
from alphaapollo.types import GroupRequest, Prompt, Sampling, TrajectoryGroup


class GroupScorer(Protocol):
    """Scorer that adds to the trajectories' rewards after their generation, e.g. a reward model's."""

    async def score_groups(self, groups: Sequence[TrajectoryGroup]) -> None: ...

    def pop_metrics(self) -> dict[str, float]: ...


@dataclass(frozen=True)
class ValidationResult:
    """Result of a validation."""

    metrics: dict[str, float]
    accuracy: float | None  # mean accuracy of sampled responses, else mean reward; None: no response was scored
    groups: dict[str, list[TrajectoryGroup]]  # by suffix of the metric names: "" (sampled) or "_greedy"


async def validate(
    engines: EngineGroup,
    prompts: Sequence[Prompt],
    settings: ValSampling,
    max_tokens: int,
    seed: int,
    console: Console,
    scorer: GroupScorer | None = None,
) -> ValidationResult:
    """Generate responses to held-out prompts and compute the metrics `val/*`. Without prompts, the result is empty.

    With settings.greedy, a second pass with temperature 0 adds the metrics `val/*_greedy`. Every validation uses the
    same random seeds. Failed trajectories are excluded, and their share is a metric.
    """
    if not prompts:
        return ValidationResult({}, None, {})
    passes = {"": (Sampling(max_tokens, settings.temperature, settings.top_p, settings.top_k, seed), settings.n)}
    if settings.greedy:
        passes["_greedy"] = (Sampling(max_tokens, temperature=0.0, seed=seed), 1)
    metrics: dict[str, float] = {}
    groups: dict[str, list[TrajectoryGroup]] = {}
    for suffix, (sampling, n) in passes.items():
        requests = [GroupRequest(prompt, n, sampling, stream_position=0, validate=True) for prompt in prompts]
        finished: dict[int, TrajectoryGroup] = {}
        console.show_phase("validate", 0, len(requests))
        async for index, group in engines.generate(requests):
            finished[index] = group
            console.show_phase("validate", len(finished), len(requests))
        groups[suffix] = [finished[index] for index in range(len(requests))]
        if scorer:
            await scorer.score_groups(groups[suffix])
            metrics |= {f"val/{name}{suffix}": value for name, value in scorer.pop_metrics().items()}
        metrics |= compute_group_metrics(groups[suffix], suffix)
    console.show_samples(groups[""], is_validation=True)
    return ValidationResult(metrics, metrics.get("val/accuracy", metrics.get("val/reward")), groups)


def compute_group_metrics(groups: Sequence[TrajectoryGroup], metric_suffix: str) -> dict[str, float]:
    """Compute the metrics `val/*` of all prompts and, if there are several data sources, of each data source."""
    pairs = [(group.prompt, trajectory) for group in groups for trajectory in group.trajectories]
    results = [convert_to_sample_result(prompt, trajectory) for prompt, trajectory in pairs]
    results = merge_repeated_prompts(results, [group.prompt for group in groups])
    metrics = compute_val_metrics(results, f"val/{{}}{metric_suffix}")
    sources = sorted({result.data_source for result in results})
    if len(sources) > 1:
        for source in sources:
            source_results = [result for result in results if result.data_source == source]
            metrics |= compute_val_metrics(source_results, f"val/{source}/{{}}{metric_suffix}")
    return metrics


def compute_val_metrics(results: Sequence[SampleResult], name_template: str) -> dict[str, float]:
    """Compute accuracy, reward, its components and response length, averaged over problems, and the share of failed
    samples. With up to n > 1 samples per problem, also pass@k for powers of two, and maj@n. If accuracies are
    unknown, only rewards and response lengths. name_template: "val/{}_greedy", ..."""
    n = count_max_samples_per_problem(results)
    means = compute_mean_metrics(results, n)
    metrics = {"failed": sum(result.outcome.failed for result in results) / len(results)}
    if not math.isnan(means["reward"]):
        metrics |= {"accuracy": means[f"avg@{n}"]} if not math.isnan(means[f"avg@{n}"]) else {}
        for name in means:
            if name in ("reward", "response_length") or name.startswith("component/"):
                metrics[name] = means[name]
        metrics_of_n = [*(f"pass@{2**power}" for power in range(n.bit_length())), f"maj@{n}"] if n > 1 else []
        for metric in metrics_of_n:
            if not math.isnan(means[metric]):  # NaN: fewer than half of the prompts have k scored samples
                metrics[metric] = means[metric]
                if metrics["failed"] and "pass@" in metric:
                    metrics[f"{metric}_problems"] = means[f"{metric}_problems"]
    return {name_template.format(name): value for name, value in metrics.items()}
