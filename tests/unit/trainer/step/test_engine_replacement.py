"""Replacement of an engine that dies during generation."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from alphaapollo.config.schema import Config
from alphaapollo.controller.handles import EngineGroup
from alphaapollo.controller.ranks import Ranks, WorkerDied, WorkerFailed
from alphaapollo.trainer.step.collect import generate_groups
from alphaapollo.types import GroupRequest, Prompt, Sampling, TrajectoryGroup

REQUESTS = [GroupRequest(Prompt(i, "test", "text"), 2, Sampling(8), stream_position=100 + i) for i in range(6)]


class Engine:
    """Records its draws; dies in its `dies_at`-th request."""

    def __init__(self, dies_at: int | None = None):
        self.played: list[int] = []
        self.left = dies_at

    async def generate(self, request: GroupRequest) -> TrajectoryGroup:
        await asyncio.sleep(0)
        if self.left is not None:
            self.left -= 1
            if self.left <= 0:
                raise WorkerDied("the rollout worker of rank 0 died", "rollout")
        self.played.append(request.stream_position)
        return TrajectoryGroup(request.prompt, [])


class Engines(Ranks[Engine]):
    role = "rollout"

    def __init__(self, workers: list[Engine]):
        self.workers, self.size = workers, len(workers)

    async def call(self, function: Callable[[Engine], Any]) -> list[Any]:
        return [function(worker) for worker in self.workers]

    async def call_with_items(self, function: Callable[[Engine, Any], Any], items: Any) -> list[Any]:
        raise NotImplementedError

    async def call_rank(self, rank: int, function: Callable[..., Any], *arguments: Any) -> Any:
        return await function(self.workers[rank], *arguments)

    async def close(self) -> None: ...


class Case:
    """Engines, and a run around them."""

    def __init__(self, *workers: Engine, can_replace_engines: bool = True, max_restarts: int = 3):
        self.workers, self.calls, self.notices = list(workers), list[str](), list[str]()
        self.next = Engine()
        self.counts: Counter[str] = Counter()
        self.run: Any = SimpleNamespace(
            workers=SimpleNamespace(
                engines=EngineGroup(Engines(self.workers), samples_in_flight=2),
                can_replace_engines=can_replace_engines,
                replace_engine=self.replace,
            ),
            weights=SimpleNamespace(publish=self.publish),
            config=Config.model_validate({"trainer": {"max_restarts": max_restarts}}),
            progress=SimpleNamespace(step=7),
            console=SimpleNamespace(notify=self.notices.append, show_phase=lambda *_: None),
            engines_replaced=0,
        )

    async def replace(self, index: int) -> None:
        self.calls.append(f"replace {index}")
        self.workers[index] = self.next

    async def publish(self, version: int) -> None:
        self.calls.append(f"publish {version}")

    def play(self) -> list[int]:
        groups = asyncio.run(generate_groups(self.run, REQUESTS, self.counts))
        return [group.prompt.id for group in groups]


def test_missing_groups_are_generated_again_with_the_same_draws() -> None:
    dying, other = Engine(dies_at=2), Engine()
    case = Case(dying, other)
    assert case.play() == [0, 1, 2, 3, 4, 5]
    assert case.calls == ["replace 0", "publish 7"]
    drawn = [*dying.played, *other.played, *case.next.played]
    assert sorted(drawn) == [request.stream_position for request in REQUESTS]  # each once
    replayed = case.counts["recovery/groups_replayed"]
    assert replayed >= 1 and case.counts["recovery/engine_restarts"] == 1
    (notice,) = case.notices
    assert notice.startswith("the rollout worker of rank 0 died") and f" {replayed} groups " in notice
    assert case.run.workers.engines.dead == set()


def test_nothing_is_counted_without_a_death() -> None:
    case = Case(Engine(), Engine())
    assert case.play() == [0, 1, 2, 3, 4, 5] and case.calls == [] and case.counts == {}


def test_the_only_engine_dies() -> None:
    case = Case(Engine(dies_at=1))
    assert case.play() == [0, 1, 2, 3, 4, 5] and case.counts["recovery/groups_replayed"] == 6
    assert case.next.played == [request.stream_position for request in REQUESTS]


@pytest.mark.parametrize("keys", [{"can_replace_engines": False}, {"max_restarts": 0}])
def test_a_death_without_replacement_ends_the_loop(keys: dict[str, Any]) -> None:
    case = Case(Engine(dies_at=3), **keys)
    with pytest.raises(WorkerDied, match="rank 0 died"):
        case.play()
    assert case.calls == [] and case.notices == []


def test_replacements_are_counted_over_the_run() -> None:
    case = Case(Engine(dies_at=1), max_restarts=1)
    assert case.play() == [0, 1, 2, 3, 4, 5]
    case.workers[0] = Engine(dies_at=1)
    with pytest.raises(WorkerDied):
        case.play()


def test_a_second_death_or_a_failed_replacement_raises_the_death() -> None:
    case = Case(Engine(dies_at=1))
    case.next = Engine(dies_at=1)
    with pytest.raises(WorkerDied):
        case.play()
    assert case.calls == ["replace 0", "publish 7"]

    async def fail(index: int) -> None:
        raise WorkerFailed("rollout engine 0 did not start")

    case = Case(Engine(dies_at=1))
    case.run.workers.replace_engine = fail
    with pytest.raises(WorkerDied, match="rank 0 died"):
        case.play()
    assert "rollout engine 0 did not start" in case.notices[-1]


def test_the_death_of_another_role_is_raised() -> None:
    case = Case(Engine())

    async def lost(request: GroupRequest) -> Any:
        raise WorkerDied("Ray's raylet died", "Ray")

    case.run.workers.engines.generate_group = lost
    with pytest.raises(WorkerDied, match="raylet"):
        case.play()
    assert case.calls == []
