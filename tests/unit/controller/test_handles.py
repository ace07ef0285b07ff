from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from alphaapollo.controller.handles import CriticGroup, EngineGroup, PolicyGroup, RewardModelGroup
from alphaapollo.controller.ranks import LocalRanks
from alphaapollo.trainer.publish import WeightPublisher
from alphaapollo.types import GroupRequest, Prompt, Sampling, TrajectoryGroup, WeightReceipt, WeightUpdate
from alphaapollo.weight_sync.verification import PROBE_TOLERANCE_BFLOAT16, Probe, WeightSyncError


@dataclass
class Engine:
    """A rollout worker that generates nothing, slowly for large ids, and counts its concurrent samples."""

    engine = property(lambda self: self)
    running: int = 0
    most: int = 0
    receipt: WeightReceipt | None = field(default_factory=lambda: WeightReceipt(1, "abc"))
    held: list[float] = field(default_factory=lambda: [-1.0, -2.0])

    async def generate(self, request: GroupRequest) -> TrajectoryGroup:
        self.running += request.num_samples
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.001 * request.prompt.id)
        self.running -= request.num_samples
        return TrajectoryGroup(request.prompt, [])

    async def wake_weights(self) -> None:
        pass

    async def wake_cache(self) -> None:
        pass

    async def confirm_weights(self, version: int, folder: str) -> WeightReceipt | None:
        return self.receipt

    async def log_probs(self, token_ids: list[int], images: Any) -> list[float]:
        return self.held

    def get_memory_metrics(self) -> dict[str, float]:
        return {"memory/engine_gib": 3.0}


@dataclass
class Policy:
    def send_weights(self, version: int) -> WeightUpdate:
        return WeightUpdate(version, "abc")

    def release_sent_weights(self) -> None:
        pass

    def get_memory_metrics(self) -> dict[str, float]:
        return {"rss_gib": 2.0}

    def compute_probe_log_probs(self, token_ids: list[int], images: Any) -> list[float]:
        return [-1.0, -2.0]


class Moved(Policy):
    def compute_probe_log_probs(self, token_ids: list[int], images: Any) -> list[float]:
        return [-1.2, -1.6]


class TwoRanks:
    """Two workers in this process."""

    def __init__(self, *workers: Engine):
        self.workers, self.size = workers, len(workers)

    async def call_rank(self, rank, function, *arguments):  # type: ignore[no-untyped-def]
        return await function(self.workers[rank], *arguments)


def requests(count: int) -> list[GroupRequest]:
    return [GroupRequest(Prompt(i, "test", "text"), 4, Sampling(8), stream_position=i) for i in range(count)]


async def collect(group: EngineGroup, count: int) -> list[int]:
    return [index async for index, _ in group.generate(requests(count))]


def test_groups_are_yielded_as_they_end_within_the_capacity() -> None:
    engines = Engine(), Engine()
    done = asyncio.run(collect(EngineGroup(TwoRanks(*engines), samples_in_flight=8), 20))  # type: ignore[arg-type]
    assert sorted(done) == list(range(20))
    assert [engine.most for engine in engines] == [8, 8]


def test_a_group_larger_than_the_capacity_runs() -> None:
    engine = Engine()
    done = asyncio.run(collect(EngineGroup(LocalRanks(engine), samples_in_flight=2), 3))  # type: ignore[arg-type]
    assert sorted(done) == [0, 1, 2]
    assert engine.most == 4


def publisher(engine: Engine) -> WeightPublisher:
    return WeightPublisher(
        PolicyGroup(LocalRanks(Policy())),  # type: ignore[arg-type]
        EngineGroup(LocalRanks(engine), 1),  # type: ignore[arg-type]
        probe=Probe([1, 2, 3]),
        probe_tolerance=1e-4,
    )


def test_publish_returns_the_gap() -> None:
    one = publisher(Engine(held=[-1.0, -2.00002]))
    assert asyncio.run(one.publish(1))["sync/probe_gap"] == pytest.approx(1e-5)
    assert (one.policy.memory_metrics, one.engines.memory_metrics) == ({"rss_gib": 2.0}, {"memory/engine_gib": 3.0})


def test_engines_without_weights_are_not_verified() -> None:
    assert asyncio.run(publisher(Engine(receipt=None, held=[0.0, 0.0])).publish(1)) == {}


def test_publish_returns_how_far_the_policy_has_moved() -> None:
    one = publisher(Engine(held=[-1.0, -2.0]))
    assert "sync/probe_moved" not in asyncio.run(one.publish(1))
    one.probe_tolerance, one.policy = 1.0, PolicyGroup(LocalRanks(Moved()))  # type: ignore[arg-type]
    assert asyncio.run(one.publish(1))["sync/probe_moved"] == pytest.approx(0.3)


def test_the_first_gap_limits_later_ones_in_bfloat16() -> None:
    one = publisher(Engine(held=[-1.0, -2.02]))
    one.probe_tolerance = PROBE_TOLERANCE_BFLOAT16
    asyncio.run(one.publish(1))
    assert one.probe_tolerance == pytest.approx(8 * 0.01)
    one.policy = PolicyGroup(LocalRanks(Moved()))  # type: ignore[arg-type]
    with pytest.raises(WeightSyncError, match="forward pass"):
        asyncio.run(one.publish(1))


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        (Engine(receipt=WeightReceipt(1, "abd")), "digest abd"),
        (Engine(receipt=WeightReceipt(0, "abc")), "version 0"),
        (Engine(held=[-1.0, -2.1]), "forward pass"),
        (Engine(held=[-1.0, float("nan")]), "forward pass"),
    ],
)
def test_any_difference_stops_the_run(engine: Engine, says: str) -> None:
    with pytest.raises(WeightSyncError, match=says):
        asyncio.run(publisher(engine).publish(1))


class FourRanks:
    """Records what each rank gets; a rank returns its number."""

    size = 4

    def __init__(self) -> None:
        self.got: list[list[str]] = []
        self.results: list[Any] = list(range(4))

    async def call(self, function):  # type: ignore[no-untyped-def]
        return [0, 1, 2, 3]

    async def call_with_items(self, function, items):  # type: ignore[no-untyped-def]
        self.got.append(list(items))
        return self.results


def test_ranks_that_share_rows_get_the_same_batch_and_return_one_result() -> None:
    ranks = FourRanks()
    policy, critic, reward = (kind(ranks, 2) for kind in (PolicyGroup, CriticGroup, RewardModelGroup))  # type: ignore

    async def use() -> list[list[int]]:
        for group in (policy, critic):
            await group.load_batch(["a", "b"])
        assert await critic.update(["c", "d"]) == 0
        ranks.results = [({"loss": rank}, rank, f"old {rank}") for rank in range(4)]
        updated = await policy.update(["c", "d"], ["e", "f"], measures_mismatch=True)
        assert updated == ({"loss": 0}, [0, 2], ["old 0", "old 2"])
        ranks.results = list(range(4))
        columns = [
            await policy.compute_log_probs(),
            await policy.compute_log_probs("reference"),
            await policy.get_old_log_probs(),
        ]
        return [*columns, await critic.compute_values(), await reward.compute_scores(["e", "f"])]

    assert asyncio.run(use()) == [[0, 2]] * 5
    with_steps = [("c", "e"), ("c", "e"), ("d", "f"), ("d", "f")]
    assert ranks.got == [list("aabb"), list("aabb"), list("ccdd"), with_steps, list("eeff")]


@pytest.mark.parametrize("measures_mismatch", [True, False])
def test_the_policy_update_and_the_mismatch_are_one_call(measures_mismatch: bool) -> None:
    class Policy:
        async def update(self, *inputs: Any) -> dict[str, Any]:
            return {"inputs": inputs}

        def sum_logprob_mismatch(self) -> str:
            return "sums"

        def get_old_log_probs(self) -> str:
            return "old"

    policy = PolicyGroup(LocalRanks(Policy()))  # type: ignore[arg-type]
    updated = asyncio.run(policy.update(["columns"], ["steps"], True, False, measures_mismatch))  # type: ignore
    assert updated == (
        {"inputs": ("columns", "steps", True, False, None)},
        ["sums"] * measures_mismatch,
        ["old"] * measures_mismatch,
    )


@pytest.mark.parametrize("receipt", [WeightReceipt(1, "abc"), None])
def test_in_flight_the_engine_is_paused_during_the_sync_and_probed_afterwards(receipt: WeightReceipt | None) -> None:
    calls: list[str] = []

    class Recorder(Engine):
        async def pause(self) -> None:
            calls.append("pause")

        async def resume(self) -> None:
            calls.append("resume")

        async def confirm_weights(self, version: int, folder: str) -> WeightReceipt | None:
            calls.append("confirm")
            return await super().confirm_weights(version, folder)

        async def log_probs(self, token_ids: list[int], images: Any) -> list[float]:
            calls.append("probe")
            return await super().log_probs(token_ids, images)

    engine = Recorder(receipt=receipt)
    asyncio.run(replace(publisher(engine), pauses_requests=True).publish(1))
    assert calls == ["pause", "confirm", "resume", "probe"]
    calls.clear()
    asyncio.run(publisher(engine).publish(1))
    assert calls == ["confirm", "probe"]
