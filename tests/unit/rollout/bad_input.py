"""Utilities for tests of failures: prompt 0 fails, prompt 1 is valid; the engine is scripted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alphaapollo.config.schema import CustomRewardFunction, Data, Env, Model, Reward, Rollout
from alphaapollo.data.rendering import Renderer, load_tokenizer
from alphaapollo.engines.fake import FakeEngine
from alphaapollo.observability.rollout_log import format_trajectory_lines
from alphaapollo.rollout.worker import RolloutWorker, RolloutWorkerConfig
from alphaapollo.trainer.metrics import compute_rollout_metrics
from alphaapollo.types import GroupRequest, Message, Prompt, Sampling, TrajectoryGroup

BAD, FINE = "bad?", "fine?"
ANSWER = r"<answer>\boxed{4}</answer>"


@dataclass(frozen=True)
class IterationResult:
    """Results of an iteration on the driver."""

    metrics: dict[str, float]
    bad: dict[str, Any]  # line of the rollout log per prompt
    fine: dict[str, Any]
    shown: list[str]  # prompt of each turn of the failing one


def play(
    folder: Path,
    say: Callable[[int], str],
    env: Env | None = None,
    reward: Reward | None = None,
    truths: tuple[str, str] = ("4", "4"),
    data_source: str = "openai/gsm8k",
    max_tokens: int = 400,
    answer: str = ANSWER,
) -> IterationResult:
    """The model answers `say(turn)` to the failing prompt and `answer` to the other one."""
    renderer = Renderer(load_tokenizer(str(folder)))
    shown: list[str] = []

    def script(token_ids: list[int], sampling: Sampling) -> list[int]:
        text, words = renderer.decode(token_ids), answer
        if BAD in text:
            shown.append(text)
            words = say(len(shown) - 1)
        return [*renderer.encode([words])[0], *sampling.stop_token_ids]

    setup = RolloutWorkerConfig(
        model=Model(path=str(folder)),
        rollout=Rollout(name="fake"),
        env=env or Env(),
        data=Data(max_prompt_length=2000, max_response_length=max_tokens),
        reward=reward or Reward(),
        custom_reward=CustomRewardFunction(),
        device="cpu",
        run_dir=str(folder),
    )
    worker = RolloutWorker(setup, engine=FakeEngine(272, script=script))
    prompts = [
        Prompt(id, data_source, [Message(role="user", content=words)], ground_truth=truth)
        for id, (words, truth) in enumerate(zip((BAD, FINE), truths, strict=True))
    ]

    async def run() -> list[TrajectoryGroup]:
        await worker.start()
        try:
            requests = [GroupRequest(prompt, 1, Sampling(max_tokens), stream_position=0) for prompt in prompts]
            return list(await asyncio.gather(*map(worker.generate, requests)))
        finally:
            await worker.close()

    groups = asyncio.run(run())
    bad, fine = map(json.loads, format_trajectory_lines(1, groups))
    return IterationResult(compute_rollout_metrics(groups, groups, 1, 1.0), bad, fine, shown)


def check_masked(played: IterationResult, outcome: str, reason: str) -> None:
    """Check that the failing prompt has a named failure and no reward, and that only the other one is counted."""
    assert (played.bad["outcome"], played.bad["reward"]) == (outcome, None)
    assert reason in played.bad["reason"]
    assert (played.fine["outcome"], played.fine["reward"]) == ("scored", 1.0)
    assert (played.metrics[f"outcome/{outcome}"], played.metrics["outcome/scored"]) == (0.5, 0.5)
    assert played.metrics["critic/score/mean"] == played.metrics["critic/score/min"] == 1.0
