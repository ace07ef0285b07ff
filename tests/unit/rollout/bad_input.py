"""For tests of what may go wrong: prompt 0 is the bad one, prompt 1 beside it is fine; the engine is scripted."""

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
from alphaapollo.observability.rollout_log import trajectory_lines
from alphaapollo.rollout.worker import RolloutWorker
from alphaapollo.trainer.metrics import rollout_metrics
from alphaapollo.types import GroupRequest, Message, Prompt, Sampling, TrajectoryGroup

BAD, FINE = "bad?", "fine?"
ANSWER = r"<answer>\boxed{4}</answer>"


@dataclass(frozen=True)
class Played:
    """What the driver sees of an iteration."""

    metrics: dict[str, float]
    bad: dict[str, Any]  # the rollout log's line of each prompt
    fine: dict[str, Any]
    shown: list[str]  # what the model was shown, a turn of the bad one


def play(
    folder: Path,
    say: Callable[[int], str],
    env: Env | None = None,
    reward: Reward | None = None,
    truths: tuple[str, str] = ("4", "4"),
    data_source: str = "math",
    max_tokens: int = 400,
    answer: str = ANSWER,
) -> Played:
    """The model says `say(turn)` to the bad prompt, and `answer` to the other."""
    renderer = Renderer(load_tokenizer(str(folder)))
    shown: list[str] = []

    def script(token_ids: list[int], sampling: Sampling) -> list[int]:
        text, words = renderer.decode(token_ids), answer
        if BAD in text:
            shown.append(text)
            words = say(len(shown) - 1)
        return [*renderer.encode([words])[0], *sampling.stop_token_ids]

    worker = RolloutWorker(
        model=Model(path=str(folder)),
        rollout=Rollout(name="fake"),
        env=env or Env(),
        data=Data(max_prompt_length=2000, max_response_length=max_tokens),
        reward=reward or Reward(),
        custom_reward=CustomRewardFunction(),
        device="cpu",
        run_dir=str(folder),
        engine=FakeEngine(272, script=script),
    )
    prompts = [
        Prompt(id, data_source, [Message(role="user", content=words)], ground_truth=truth)
        for id, (words, truth) in enumerate(zip((BAD, FINE), truths, strict=True))
    ]

    async def run() -> list[TrajectoryGroup]:
        await worker.start()
        try:
            requests = [GroupRequest(prompt, 1, Sampling(max_tokens), draw=0) for prompt in prompts]
            return list(await asyncio.gather(*map(worker.generate, requests)))
        finally:
            await worker.close()

    groups = asyncio.run(run())
    bad, fine = map(json.loads, trajectory_lines(1, groups))
    return Played(rollout_metrics(groups, groups, 1, 1.0), bad, fine, shown)


def check_masked(played: Played, outcome: str, reason: str) -> None:
    """The bad one has a named failure and no reward; the other one has its reward, and is the only one counted."""
    assert (played.bad["outcome"], played.bad["reward"]) == (outcome, None)
    assert reason in played.bad["reason"]
    assert (played.fine["outcome"], played.fine["reward"]) == ("scored", 1.0)
    assert (played.metrics[f"outcome/{outcome}"], played.metrics["outcome/scored"]) == (0.5, 0.5)
    assert played.metrics["reward/mean"] == played.metrics["reward/min"] == 1.0
