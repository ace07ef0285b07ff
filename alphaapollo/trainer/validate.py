"""Validation: the held-out prompts through the same engines, environments and rewards as training."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from alphaapollo.config.schema import ValSampling
from alphaapollo.controller.handles import EngineGroup
from alphaapollo.observability.console import Console
from alphaapollo.trainer.collect import generate
from alphaapollo.types import GroupRequest, Prompt, Sampling, TrajectoryGroup


async def validate(
    engines: EngineGroup,
    prompts: Sequence[Prompt],
    settings: ValSampling,
    max_tokens: int,
    seed: int,
    console: Console,
) -> tuple[dict[str, float], dict[str, list[TrajectoryGroup]]]:
    """val/accuracy (sampled) and, where asked for, val/accuracy_greedy; and the groups of each pass by its suffix.

    The draws are the same at every validation, so that two of them differ by the weights alone. A failed trajectory
    counts as missing, and the share of them is a metric.
    """
    passes = {"": (Sampling(max_tokens, settings.temperature, settings.top_p, settings.top_k, seed), settings.n)}
    if settings.greedy:
        passes["_greedy"] = (Sampling(max_tokens, temperature=0.0, seed=seed), 1)
    metrics: dict[str, float] = {}
    groups: dict[str, list[TrajectoryGroup]] = {}
    for suffix, (sampling, n) in passes.items():
        own, groups[suffix] = await _run(engines, prompts, sampling, n, console, suffix)
        metrics |= own
    return metrics, groups


async def _run(
    engines: EngineGroup, prompts: Sequence[Prompt], sampling: Sampling, n: int, console: Console, suffix: str
) -> tuple[dict[str, float], list[TrajectoryGroup]]:
    requests = [GroupRequest(prompt, n, sampling, draw=0, validate=True) for prompt in prompts]
    groups = await generate(engines, requests, console, "validate")
    by_source: dict[str, list[TrajectoryGroup]] = defaultdict(list)
    for group in groups:
        by_source[group.prompt.data_source].append(group)
    metrics = _metrics(groups, f"val/{{}}{suffix}")
    if len(by_source) > 1:
        for source, own in by_source.items():
            metrics |= _metrics(own, f"val/{source}/{{}}{suffix}")
    return metrics, groups


def _metrics(groups: Sequence[TrajectoryGroup], name: str) -> dict[str, float]:
    """`name` has a place for the figure's name, e.g. "val/{}_greedy"."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    scored = [trajectory for trajectory in trajectories if not trajectory.score.outcome.failed]
    metrics = {name.format("failed"): 1 - len(scored) / len(trajectories)}
    if scored:
        metrics[name.format("accuracy")] = float(np.mean([t.score.accuracy for t in scored]))
        metrics[name.format("reward")] = float(np.mean([t.score.reward for t in scored]))
        metrics[name.format("response_length")] = float(np.mean([t.num_tokens for t in trajectories]))
    return metrics
