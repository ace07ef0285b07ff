"""The n episodes of one prompt: n single-use environments, played at once."""

from __future__ import annotations

import asyncio
from functools import partial

from alphaapollo.config.schema import Env
from alphaapollo.environments.base import EnvironmentFactory, ScoreFn
from alphaapollo.rollout.episode import EpisodeRunner, EpisodeTask
from alphaapollo.seeds import derive_seed
from alphaapollo.types import GroupRequest, TrajectoryGroup


async def run_group(
    request: GroupRequest, runner: EpisodeRunner, factory: EnvironmentFactory, score: ScoreFn, config: Env
) -> TrajectoryGroup:
    """All episodes of the group, in sample order whatever order they end in. Should one of them raise (an engine's
    death, a prompt too long), the others are cancelled."""
    purpose = "validate" if request.validate else "rollout"
    prompt, sampling = request.prompt, request.sampling

    def task(sample: int) -> EpisodeTask:
        return EpisodeTask(
            prompt,
            sample,
            make_environment=partial(factory, prompt, score, config),
            sampling=sampling,
            seed_of_turn=partial(derive_seed, sampling.seed, purpose, request.draw, prompt.id, sample),
            name=f"{purpose}.{request.draw}.{prompt.id}.{sample}",
        )

    episodes = [asyncio.ensure_future(runner.run(task(sample))) for sample in range(request.num_samples)]
    try:
        return TrajectoryGroup(prompt, await asyncio.gather(*episodes))
    finally:
        for episode in episodes:
            episode.cancel()
