from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from alphaapollo.controller.engine_group import EngineGroup
from alphaapollo.controller.handles import CriticGroup, PolicyGroup, RewardModelGroup
from alphaapollo.controller.ranks import LocalRanks
from alphaapollo.engines.weight_sync.transport import WeightReceipt, WeightUpdate
from alphaapollo.engines.weight_sync.verification import (
    PROBE_TOLERANCE_BFLOAT16,
    PROBE_TOLERANCE_FLOAT32,
    Probe,
    WeightSyncError,
)
from alphaapollo.session.publish import WeightPublisher
from alphaapollo.types import Completion, GroupRequest, Prompt, Sampling, StopReason, TrajectoryGroup


@dataclass
class Engine:
    """A rollout worker that generates nothing, slowly for large ids, and counts its concurrent samples."""

    engine = property(lambda self: self)
    running: int = 0
    most: int = 0
    receipt: WeightReceipt | None = field(default_factory=lambda: WeightReceipt(1, "abc"))
    held: list[float] = field(default_factory=lambda: [-1.0, -2.0])
    sampled: float | None = None  # log-prob of a sampled token; None: held
    calls: list[str] = field(default_factory=list)  # of a weight sync
    updates_in_flight: bool = False

    async def generate(self, request: Any, *of_the_engine: Any) -> Any:
        if of_the_engine:
            self.calls.append("sample")
            return Completion([7], [self.held[-1] if self.sampled is None else self.sampled], StopReason.LENGTH, 1)
        self.running += request.num_samples
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.001 * request.prompt.id)
        self.running -= request.num_samples
        return TrajectoryGroup(request.prompt, [])

    async def wake_weights(self) -> None:
        pass

    async def wake_cache(self) -> None:
        pass

    async def release_cache(self) -> None:
        pass

    async def pause(self) -> None:
        self.calls.append("pause")

    async def resume(self) -> None:
        self.calls.append("resume")

    async def confirm_weights(self, version: int, folder: str) -> WeightReceipt | None:
        self.calls.append("confirm")
        return self.receipt

    async def log_probs(self, token_ids: list[int], images: Any) -> list[float]:
        self.calls.append("probe")
        return self.held

    def get_memory_metrics(self) -> dict[str, float]:
        return {"memory/engine_gib": 3.0}


@dataclass
class Policy:
    held: list[float] = field(default_factory=lambda: [-1.0, -2.0])

    def send_weights(self, version: int) -> WeightUpdate:
        return WeightUpdate(version, "abc")

    def release_sent_weights(self) -> None:
        pass

    def get_memory_metrics(self) -> dict[str, float]:
        return {"rss_gib": 2.0}

    def compute_probe_log_probs(self, token_ids: list[int], images: Any) -> list[float]:
        return self.held


class TwoRanks:
    """Two workers in this process."""

    def __init__(self, *workers: Engine):
        self.workers, self.size = workers, len(workers)

    async def call_rank(self, rank, function, *arguments):  # type: ignore[no-untyped-def]
        return await function(self.workers[rank], *arguments)

    async def call(self, function):  # type: ignore[no-untyped-def]
        return [(await LocalRanks(worker).call(function))[0] for worker in self.workers]


def requests(count: int) -> list[GroupRequest]:
    return [GroupRequest(Prompt(i, "test", "text"), 4, Sampling(8), stream_position=i) for i in range(count)]


async def collect(group: EngineGroup, count: int) -> list[int]:
    return [index async for index, _ in group.generate(requests(count))]


def test_groups_are_yielded_as_they_end_within_the_capacity() -> None:
    engines = Engine(), Engine()
    done = asyncio.run(collect(EngineGroup(TwoRanks(*engines), samples_in_flight=8), 20))  # type: ignore[arg-type]
    assert sorted(done) == list(range(20))
    assert [engine.most for engine in engines] == [8, 8]


def make_publisher(engine: Engine, policy: Policy, tolerance: float = 1e-4, pauses_requests: bool = False) -> Any:
    groups = PolicyGroup(LocalRanks(policy)), EngineGroup(LocalRanks(engine), 1)  # type: ignore[arg-type]
    return WeightPublisher(*groups, probe=Probe([1, 2, 3]), probe_tolerance=tolerance, pauses_requests=pauses_requests)


def publish(publisher: WeightPublisher) -> dict[str, float]:
    return asyncio.run(publisher.publish(1))


def test_publish_returns_the_gap_and_how_far_the_policy_has_moved() -> None:
    policy = Policy()
    publisher = make_publisher(Engine(held=[-1.0, -2.00002]), policy)
    assert publish(publisher) == {"sync/probe_gap": pytest.approx(1e-5), "engines/replaced": 0.0}
    assert publisher.policy.memory_metrics == {"rss_gib": 2.0}
    assert publisher.engines.memory_metrics == {"memory/engine_gib": 3.0}
    publisher.probe_tolerance, policy.held = 1.0, [-1.2, -1.6]
    assert publish(publisher)["sync/probe_moved"] == pytest.approx(0.3)


def test_engines_without_weights_are_not_verified() -> None:
    assert publish(make_publisher(Engine(receipt=None, held=[0.0, 0.0]), Policy())) == {}


def test_the_first_gap_limits_later_ones_in_bfloat16() -> None:
    policy = Policy()
    publisher = make_publisher(Engine(held=[-1.0, -2.02]), policy, PROBE_TOLERANCE_BFLOAT16)
    publish(publisher)
    assert publisher.probe_tolerance == pytest.approx(8 * 0.01)
    policy.held = [-1.2, -1.6]
    with pytest.raises(WeightSyncError, match="forward pass"):
        publish(publisher)


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        (Engine(receipt=WeightReceipt(1, "abd")), "digest abd"),
        (Engine(receipt=WeightReceipt(0, "abc")), "version 0"),
        (Engine(held=[-1.0, -2.1]), "forward pass"),
        (Engine(held=[-1.0, float("nan")]), "forward pass"),
        (Engine(sampled=-2.001), "of engine 1 differ .* tokens that it sampled"),
        (Engine(sampled=float("nan")), "of engine 1 differ .* tokens that it sampled"),
    ],
)
def test_any_difference_stops_the_run(engine: Engine, says: str) -> None:
    """Engine 0 is right."""
    publisher = make_publisher(engine, Policy(), PROBE_TOLERANCE_FLOAT32)
    publisher.engines = EngineGroup(TwoRanks(Engine(), engine), 1)  # type: ignore[arg-type]
    with pytest.raises(WeightSyncError, match=says):
        publish(publisher)


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
            group.load_batch(["a", "b"])
        assert await critic.update(["c", "d"]) == 0
        ranks.results = [({"loss": rank}, rank, f"old {rank}") for rank in range(4)]
        updated = await policy.update(["c", "d"], ["e", "f"], measures_mismatch=True)
        assert updated == ({"loss": 0}, [0, 2], ["old 0", "old 2"])
        ranks.results = list(range(4))
        columns = await policy.compute_log_probs(), await policy.compute_log_probs("reference")
        columns += (await policy.get_old_log_probs(), await critic.compute_values())
        return [*columns, await reward.compute_scores(["e", "f"])]

    assert asyncio.run(use()) == [[0, 2]] * 5
    with_steps = [("a", ("c", "e"))] * 2 + [("b", ("d", "f"))] * 2
    assert ranks.got == [[*zip("aabb", "ccdd", strict=True)], with_steps, list("eeff")]


def test_the_policy_update_and_the_mismatch_are_one_call() -> None:
    class Policy:
        async def update(self, *inputs: Any) -> dict[str, Any]:
            return {"inputs": inputs}

        def sum_logprob_mismatch(self) -> str:
            return "sums"

        def get_old_log_probs(self) -> str:
            return "old"

    policy = PolicyGroup(LocalRanks(Policy()))  # type: ignore[arg-type]
    for measures, sums, old in ((True, ["sums"], ["old"]), (False, [], [])):
        updated = asyncio.run(policy.update(["columns"], ["steps"], True, False, measures))  # type: ignore
        assert updated == ({"inputs": ("columns", "steps", True, False, None)}, sums, old)


@pytest.mark.parametrize("receipt", [WeightReceipt(1, "abc"), None])
@pytest.mark.parametrize(
    ("pauses_requests", "in_flight", "calls"),
    [
        (True, False, ["pause", "confirm", "resume", "probe", "sample"]),
        (True, True, ["confirm", "resume", "probe", "sample"]),  # resume does nothing
        (False, False, ["confirm", "probe", "sample"]),
    ],
)
def test_the_engine_is_paused_during_the_sync_unless_requests_keep_their_weights(
    receipt: WeightReceipt | None, pauses_requests: bool, in_flight: bool, calls: list[str]
) -> None:
    engine = Engine(receipt=receipt, updates_in_flight=in_flight)
    publish(make_publisher(engine, Policy(), pauses_requests=pauses_requests))
    assert engine.calls == calls
