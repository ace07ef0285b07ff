"""Rollout workers on a CPU: their set-up, and groups from start to close."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from alphaapollo.config.schema import CustomRewardFunction, Data, Env, Model, Reward, Rollout
from alphaapollo.rollout.worker import RolloutWorker, RolloutWorkerConfig
from alphaapollo.types import GroupRequest, TrajectoryGroup
from examples.quickstart.make_task import make_tokenizer


def write_model(folder: Path) -> Path:
    """Write the tokenizer and the config of a model for the fake engine."""
    make_tokenizer(folder)
    (folder / "config.json").write_text('{"vocab_size": 272}')
    return folder


def make_worker(
    model: Path, engine: Any = None, env: Env | None = None, reward: Reward | None = None, **data: Any
) -> RolloutWorker:
    """Worker whose run folder is the model's folder. `data`: keys of the section data."""
    setup = RolloutWorkerConfig(
        model=Model(path=str(model)),
        rollout=Rollout(name="fake"),
        env=env or Env(),
        data=Data(**data),
        reward=reward or Reward(),
        custom_reward=CustomRewardFunction(),
        device="cpu",
        run_dir=str(model),
    )
    return RolloutWorker(setup, engine=engine)


def generate(worker: RolloutWorker, *requests: GroupRequest) -> list[TrajectoryGroup]:
    """Start the worker, make the groups at the same time, and close the worker."""

    async def run() -> list[TrajectoryGroup]:
        await worker.start()
        try:
            return list(await asyncio.gather(*map(worker.generate, requests)))
        finally:
            await worker.close()
            await worker.close()  # a second call has no effect

    return asyncio.run(run())
