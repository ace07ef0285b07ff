"""Rollout workers on a CPU: their set-up, an engine that answers with texts, and groups from start to close."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from alphaapollo.config.schema import CustomRewardFunction, Data, Env, Model, Reward, Rollout
from alphaapollo.data.rendering import Renderer
from alphaapollo.data.vocabulary import load_tokenizer
from alphaapollo.engines.fake import FakeEngine
from alphaapollo.rollout.worker import RolloutWorker, RolloutWorkerConfig
from alphaapollo.types import GroupRequest, Sampling, TrajectoryGroup
from examples.quickstart.make_task import make_tokenizer


def write_model(folder: Path) -> Path:
    """Write the tokenizer and the config of a model for the fake engine."""
    make_tokenizer(folder)
    (folder / "config.json").write_text('{"vocab_size": 272}')
    return folder


class TextEngine(FakeEngine):
    """Engine that answers with `answer(text of the prompt)`, and records the requests."""

    def __init__(self, model: Path, answer: Callable[[str], str]):
        self.renderer = Renderer(load_tokenizer(str(model)))
        self.requests: list[tuple[str, Sampling]] = []
        self._answer = answer
        super().__init__(300, script=self._write)

    def _write(self, token_ids: list[int], sampling: Sampling) -> list[int]:
        text = self.renderer.decode(token_ids)
        self.requests.append((text, sampling))
        return [*self.renderer.encode([self._answer(text)])[0], *sampling.stop_token_ids]


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
