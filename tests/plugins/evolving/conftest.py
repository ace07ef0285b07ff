from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from alphaapollo.planning import trials
from alphaapollo.plugins.evolving import run as evolving_run
from alphaapollo.rewards.base import convert_to_score
from alphaapollo.rewards.registry import load_grader
from alphaapollo.types import Prompt, Score, Turn
from tests.plugins.evolving.scripted import Command, Server, arithmetic, serving


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    pytest.importorskip("openai", reason="the client of servers is an optional package")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving(arithmetic) as server:
        yield server


class InProcessGrader:
    """Reward client that grades in this process."""

    def __init__(self, *_: Any):
        pass

    async def start(self) -> None:
        pass

    async def score(self, prompt: Prompt, text: str, turns: Sequence[Turn] = ()) -> Score:
        return convert_to_score(load_grader(prompt.data_source)(prompt, text))

    async def score_ground_truth(self, prompt: Prompt) -> Score:
        return await self.score(prompt, f"#### {prompt.ground_truth}")

    async def close(self) -> None:
        pass


@pytest.fixture
def command(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    for module in (evolving_run, trials):
        monkeypatch.setattr(module, "RewardClient", InProcessGrader)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    return Command(tmp_path, server.url)
