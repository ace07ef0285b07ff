"""Run all episodes of one prompt concurrently, each in its own environment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from alphaapollo.environments.base import Environment
from alphaapollo.rollout.agents.runner import AgentRunner
from alphaapollo.rollout.episode import EpisodeRunner, EpisodeTask
from alphaapollo.types import GroupRequest, Sampling, TrajectoryGroup, Turn
from alphaapollo.utils.seeds import derive_seed


async def run_group(
    request: GroupRequest,
    runner: EpisodeRunner | AgentRunner,
    make_environment: Callable[[Sequence[Turn]], Environment],
) -> TrajectoryGroup:
    """Run the episodes of a group, and a greedy episode (ReMax) if requested. Returns the trajectories in sample order.

    If an episode raises, e.g. because the engine died, all other episodes of the group are cancelled.
    """
    purpose = "validate" if request.validate else "rollout"
    prompt, sampling, position = request.prompt, request.sampling, request.stream_position

    def make_episode_task(sample_index: int, sampling: Sampling) -> EpisodeTask:
        return EpisodeTask(
            prompt,
            sample_index,
            make_environment,
            sampling=sampling,
            derive_turn_seed=partial(derive_seed, sampling.seed, purpose, position, prompt.id, sample_index),
            name=f"{purpose}.{position}.{prompt.id}.{sample_index}",
        )

    tasks = [make_episode_task(sample, sampling) for sample in range(request.num_samples)]
    if request.greedy_baseline:
        tasks.append(make_episode_task(request.num_samples, replace(sampling, temperature=0.0, top_p=1.0, top_k=-1)))
    episodes = [asyncio.ensure_future(runner.run(task)) for task in tasks]
    try:
        trajectories = await asyncio.gather(*episodes)
        baseline = trajectories.pop() if request.greedy_baseline else None
        untrained = [*(trajectories if request.validate else []), *([baseline] if baseline else [])]
        for row in [row for trajectory in untrained for row in trajectory.rows]:
            row.columns = {}  # only training uses them
        return TrajectoryGroup(prompt, trajectories, baseline)
    finally:
        for episode in episodes:
            episode.cancel()
