"""Engines that die: they are started again with the same weights, and their groups are sampled again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from alphaapollo.controller.engine_group import EngineGroup
from alphaapollo.controller.errors import EngineCoreDied, WorkerDied
from alphaapollo.controller.handles import PolicyGroup
from alphaapollo.controller.ranks import LocalRanks
from alphaapollo.engines.fake import FakeEngine
from alphaapollo.engines.types import EngineDied
from alphaapollo.engines.weight_sync.transport import WeightReceipt, WeightUpdate
from alphaapollo.engines.weight_sync.verification import Probe
from alphaapollo.rollout.worker import RolloutWorker
from alphaapollo.session.publish import MAX_REPLACEMENTS, WeightPublisher
from alphaapollo.types import Adapter, Completion, GroupRequest, ImageInput, Prompt, Sampling
from tests.unit.controller.test_handles import TwoRanks
from tests.unit.rollout.worker_kit import make_worker, write_model


class DyingEngine(FakeEngine):
    """Engine that dies in its requests and weight syncs of these numbers, and that counts its starts."""

    def __init__(self, requests: Sequence[int] = (), syncs: Sequence[int] = ()):
        super().__init__(272)
        self.dies_in = {"request": {*requests}, "sync": {*syncs}}
        self.counts, self.starts, self.died = {"request": 0, "sync": 0}, 0, False

    @property
    def is_dead(self) -> bool:
        return self.died

    async def start(self) -> None:
        self.starts, self.died = self.starts + 1, False

    def count(self, kind: str) -> None:
        self.counts[kind] += not self.died
        self.died |= self.counts[kind] in self.dies_in[kind]
        if self.died:
            raise EngineDied("engine: its core process died. See its log: e.log")

    async def generate(
        self, token_ids: list[int], sampling: Sampling, request_id: str, images: Sequence[ImageInput] = ()
    ) -> Completion:
        await asyncio.sleep(0)
        if request_id != "probe":
            self.count("request")
            self.check_has_weights()
        return await super().generate(token_ids, sampling, request_id, images)

    async def load_adapter(self, adapter: Adapter) -> str:
        self.count("request")
        return "digest"

    async def apply_weights(self, version: int) -> WeightReceipt:  # type: ignore[override]
        self.count("sync")
        await super().apply_weights(version)
        return WeightReceipt(version, f"digest {version}")


class Policy:
    digest = "digest"

    def send_weights(self, version: int) -> WeightUpdate:
        return WeightUpdate(version, f"{self.digest} {version}")

    def release_sent_weights(self) -> None: ...

    def get_memory_metrics(self) -> dict[str, float]:
        return {}

    def compute_probe_log_probs(self, token_ids: list[int], images: Any) -> list[float]:
        return [-1.0] * (len(token_ids) - 1)


class Setup:
    """Started rollout workers with these engines, their group and a publisher."""

    def __init__(self, folder: Path, *engines: DyingEngine):
        self.workers: list[RolloutWorker] = [make_worker(write_model(folder), engine=engine) for engine in engines]
        ranks: Any = LocalRanks(self.workers[0], "rollout") if len(engines) == 1 else LocalTwoRanks(*self.workers)  # type: ignore[arg-type]
        self.engines, self.policy, self.warnings = EngineGroup(ranks, 8), Policy(), list[str]()
        policy = PolicyGroup(LocalRanks(self.policy))  # type: ignore[arg-type]
        self.publisher = WeightPublisher(policy, self.engines, Probe([1, 2, 3]), 1e-4, warn=self.warnings.append)

    async def __aenter__(self) -> Setup:
        for worker in self.workers:
            await worker.start()
        await self.publisher.publish(7)
        return self

    async def __aexit__(self, *_: object) -> None:
        for worker in self.workers:
            await worker.close()

    async def sample(self) -> list[list[Completion]]:
        """Four groups of two samples. Their order and times are those of the engines."""
        requests = [GroupRequest(Prompt(number, "test", "text"), 2, Sampling(8, seed=5), number) for number in range(4)]
        groups = {number: group async for number, group in self.engines.generate(requests)}
        return [[one.turns[0].completion for one in groups[number].trajectories] for number in range(4)]


class LocalTwoRanks(TwoRanks):
    """Two workers in this process, whose errors are those of LocalRanks."""

    role = "rollout"

    async def call_rank(self, rank, function, *arguments):  # type: ignore[no-untyped-def]
        return await LocalRanks(self.workers[rank], self.role).call_rank(0, function, *arguments)


async def sample_with(folder: Path, *engines: DyingEngine) -> tuple[list[list[Completion]], Setup, dict[str, float]]:
    async with Setup(folder, *engines) as setup:
        return await setup.sample(), setup, await setup.publisher.publish(8)


@pytest.mark.parametrize(
    ("engines", "num_warnings"), [([DyingEngine([3, 6])], 2), ([DyingEngine([3]), DyingEngine([4])], 1)]
)
def test_groups_of_an_engine_that_died_are_sampled_again_with_the_same_tokens(
    tmp_path: Path, engines: list[DyingEngine], num_warnings: int
) -> None:
    expected, setup, metrics = asyncio.run(sample_with(tmp_path, DyingEngine()))
    assert setup.warnings == [] and metrics["engines/replaced"] == 0
    answers, setup, metrics = asyncio.run(sample_with(tmp_path, *engines))
    assert answers == expected and {one.weight_version for group in answers for one in group} == {7}
    assert sum(engine.starts for engine in engines) == len(engines) + 2 and metrics["engines/replaced"] == 2
    assert len(setup.warnings) == num_warnings and "e.log" in setup.warnings[0]


def test_an_engine_that_dies_in_a_weight_sync_or_while_idle_is_replaced(tmp_path: Path) -> None:
    async def run() -> tuple[dict[str, float], DyingEngine]:
        engine = DyingEngine(syncs=[2])
        async with Setup(tmp_path, engine, DyingEngine()) as setup:
            metrics = await setup.publisher.publish(8)
            assert metrics["engines/replaced"] == 1
            engine.died = setup.publisher.pauses_requests = True
            await setup.publisher.hand_over(pauses_requests=True)
            return await setup.publisher.publish(9), engine

    metrics, engine = asyncio.run(run())
    assert metrics["engines/replaced"] == 1 and engine.starts == 3 and not engine.awaits_weights_after_restart


def test_requests_fail_until_a_restarted_engine_has_weights(tmp_path: Path) -> None:
    async def run() -> None:
        async with Setup(tmp_path, DyingEngine([1])) as setup:
            request = GroupRequest(Prompt(0, "test", "text"), 1, Sampling(8), 0)
            for _ in range(2):
                with pytest.raises(EngineCoreDied):
                    await setup.engines.generate_group(request)
                await setup.engines.restart_dead_engines()
            await setup.publisher.publish(8)
            await setup.engines.generate_group(request)

    asyncio.run(run())


def test_an_engine_that_dies_while_adapters_are_loaded_is_replaced(tmp_path: Path) -> None:
    """Any number of times, because each adapter that is loaded starts a new count."""

    async def answer(*_: Any) -> Any:
        return [SimpleNamespace(prompt_logprobs=[{2: -1.0}, {3: -1.0}])]

    async def run() -> DyingEngine:
        engine, update = DyingEngine(range(1, 30, 2)), WeightUpdate(9, "digest")
        async with Setup(tmp_path, engine) as setup:
            setup.workers[0].answer = answer  # type: ignore[method-assign]
            for _ in range(2 * MAX_REPLACEMENTS):
                assert await setup.publisher.load_adapter(Adapter("folder", 9), update, [-1.0, -1.0]) == 0
        return engine

    assert asyncio.run(run()).starts == 1 + 2 * MAX_REPLACEMENTS


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (lambda setup: None, f"already replaced {MAX_REPLACEMENTS} times"),
        (lambda setup: setattr(setup.publisher, "on_cpus", False), "on GPUs"),
        (lambda setup: setattr(setup.policy, "digest", "other"), "the policy has changed since version 7"),
    ],
)
def test_reasons_against_a_replacement(tmp_path: Path, change: Any, fact: str) -> None:
    async def run() -> int:
        engine = DyingEngine(range(1, 100))
        async with Setup(tmp_path, engine) as setup:
            change(setup)
            with pytest.raises(WorkerDied, match=fact) as error:
                await setup.sample()
            assert error.type is WorkerDied and error.value.role == "rollout"
        return engine.starts

    assert asyncio.run(run()) == 1 + (MAX_REPLACEMENTS if "times" in fact else "changed" in fact)
