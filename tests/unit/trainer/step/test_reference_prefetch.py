"""Prefetched reference log-probs depend on their group only; failures end generation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from alphaapollo.config.schema import Config
from alphaapollo.controller.handles import EngineGroup, PolicyGroup
from alphaapollo.controller.ranks import LocalRanks, Ranks, WorkerDied
from alphaapollo.data.batch import RankBatch
from alphaapollo.trainer.step.collect import generate_groups
from alphaapollo.trainer.step.reference_prefetch import ReferencePrefetcher
from alphaapollo.trainer.step.training_batch import Batch
from alphaapollo.types import GroupRequest, Outcome, Prompt, Sampling, TrajectoryGroup
from tests.builders import make_completion, make_trajectory, make_turn
from tests.unit.tiny import free_address, save_model, some_rows
from tests.unit.trainer.samples import build, group, trajectory
from tests.unit.workers.training import Case, make_worker

Reply = Callable[[RankBatch], np.ndarray]


def rows_of(batch: RankBatch) -> np.ndarray:
    """A column that encodes a row's last token and the size of its micro-batch."""
    column = np.zeros(int(batch.rows.response_offsets[-1]), dtype=np.float32)
    for micro in batch.mini_batches[0].micro_batches:
        own = float(sum(batch.rows.lengths[position] for position in micro))
        for position in micro:
            start, end = batch.rows.response_offsets[position : position + 2]
            column[start:end] = batch.rows.token_ids[batch.rows.token_offsets[position + 1] - 1] + own / 1000
    return column


class Policy(Ranks[Any]):
    """Ranks that record the forward passes of each call and allow one call at a time."""

    role = "policy"

    def __init__(self, size: int, reply: Reply = rows_of):
        self.size, self.reply = size, reply
        self.calls: list[list[list[int]]] = []
        self.busy = False

    async def call_with_items(self, function: Any, items: Sequence[RankBatch]) -> list[np.ndarray]:
        assert not self.busy, "two calls at a time"
        self.busy = True
        await asyncio.sleep(0)
        self.calls.append([[len(micro) for micro in one.mini_batches[0].micro_batches] for one in items])
        self.busy = False
        return [self.reply(one) for one in items]

    async def call(self, function: Callable[[Any], Any]) -> list[Any]:
        raise NotImplementedError

    async def call_rank(self, rank: int, function: Callable[..., Any], *arguments: Any) -> Any:
        raise NotImplementedError

    async def close(self) -> None: ...


def ahead_of(ranks: Any, max_tokens: int = 100, shares_prompts: bool = False) -> ReferencePrefetcher:
    return ReferencePrefetcher(PolicyGroup(ranks), ranks.size, max_tokens, padded=False, shares_prompts=shares_prompts)


def some_groups(count: int) -> list[TrajectoryGroup]:
    return [group(trajectory(0, 1.0, 2 + index), trajectory(1, 0.0, 3 + 2 * index)) for index in range(count)]


async def played(reference: ReferencePrefetcher, groups: Sequence[TrajectoryGroup], together: int) -> None:
    """Finish `together` groups at a time."""
    for first in range(0, len(groups), together):
        for one in groups[first : first + together]:
            reference.add_group(one)
        for _ in range(20):
            await asyncio.sleep(0)


def matrix_of(
    ranks: Policy, groups: list[TrajectoryGroup], ended: Sequence[TrajectoryGroup], together: int, batch: Batch
) -> np.ndarray:
    async def run() -> np.ndarray:
        reference = ahead_of(ranks)
        await reference.prefetch_during(played(reference, ended, together))
        return await reference.get_logprobs(groups, batch)

    return asyncio.run(run())


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_log_probs_do_not_depend_on_order_or_batching(num_ranks: int) -> None:
    """One by one, together, in reverse order, or all of them later as in a replay."""
    groups = some_groups(5)
    batch = build(groups)
    expected = matrix_of(Policy(1), groups, [], 1, batch)
    assert len(expected) == batch.layout.response_offsets[-1] and not np.isin(expected, 0).any()
    for ended, together in ((groups, 1), (groups, 5), (groups[::-1], 2), (groups[1:3], 1)):
        np.testing.assert_array_equal(matrix_of(Policy(num_ranks), groups, ended, together, batch), expected)


def test_each_rank_gets_one_group_and_the_same_number_of_forward_passes() -> None:
    groups = some_groups(3)
    ranks = Policy(2)

    async def run() -> dict[str, float]:
        reference = ahead_of(ranks, max_tokens=9)
        await reference.prefetch_during(played(reference, groups, 3))
        return reference.pop_metrics()

    assert asyncio.run(run()) == {"perf/reference_ahead": 1.0}
    assert ranks.calls == [[[2, 0], [1, 1]], [[1, 1], [0, 0]]]


def test_rows_that_fail_later_are_computed_but_not_returned() -> None:
    """A reward model may fail a sample after the group has ended; the other rows do not change."""
    one = group(trajectory(0, 1.0, 2), trajectory(1, 0.0, 5, outcome=Outcome.GRADER_FAILED), trajectory(2, 0.0, 3))
    logprobs = matrix_of(Policy(1), [one], [one], 1, build([one]))
    assert logprobs.shape == (5,)
    np.testing.assert_allclose(logprobs[[0, 2]] % 1, 0.016, atol=1e-5)  # 4 + 7 + 5 tokens in one forward pass


def test_an_error_of_the_reference_cancels_generation_and_one_of_generation_is_raised() -> None:
    def dies(batch: RankBatch) -> np.ndarray:
        raise WorkerDied("the policy worker of rank 0 (pid 7) died", "policy")

    ended: list[str] = []

    async def for_ever(reference: ReferencePrefetcher) -> None:
        reference.add_group(some_groups(1)[0])
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    async def run() -> None:
        reference = ahead_of(Policy(1, dies))
        await asyncio.wait_for(reference.prefetch_during(for_ever(reference)), timeout=30)

    with pytest.raises(WorkerDied, match=r"rank 0 \(pid 7\)"):
        asyncio.run(run())
    assert ended == ["cancelled"]

    async def fails() -> None:
        raise ValueError("the engine's")

    with pytest.raises(ValueError, match="the engine's"):
        asyncio.run(ahead_of(Policy(1)).prefetch_during(fails()))


class Engine:
    """Generates a group per request; all samples of the third fail, those of the fourth are equal."""

    async def generate(self, request: GroupRequest) -> TrajectoryGroup:
        outcome = Outcome.GRADER_FAILED if request.stream_position == 2 else Outcome.SCORED
        rewards = (1.0, 1.0) if request.stream_position == 3 else (1.0, 0.0)
        return group(*(trajectory(i, reward, 2, outcome) for i, reward in enumerate(rewards)))


@pytest.mark.parametrize(("filters", "looked_at"), [(False, 3), (True, 2)])
def test_groups_that_are_not_trained_on_are_not_computed(filters: bool, looked_at: int) -> None:
    ranks = Policy(1)
    requests = [GroupRequest(Prompt(0, "test", "text"), 2, Sampling(8), stream_position=draw) for draw in range(4)]
    algorithm = {"filter_groups": {"enable": filters, "metric": "reward"}}
    config = {"algorithm": algorithm, "env": {"rollout": {"n": 2}}}
    run: Any = SimpleNamespace(
        config=Config.model_validate(config),
        workers=SimpleNamespace(engines=EngineGroup(LocalRanks(Engine()), 100)),  # type: ignore[arg-type]
        console=SimpleNamespace(show_phase=lambda *_: None),
        reward_model_scorer=None,
        reference_prefetcher=ahead_of(ranks),
    )
    assert len(asyncio.run(generate_groups(run, requests, None))) == 4  # type: ignore[arg-type]
    assert len(ranks.calls) == looked_at


def real_groups() -> list[TrajectoryGroup]:
    """Four groups of three samples with a shared prompt."""
    groups = []
    for start in range(0, 12, 3):
        rows = some_rows(12)[start : start + 3]
        prompt = rows[0].token_ids[: rows[0].response_start]
        answers = [[5 + index, *row.token_ids[row.response_start :]] for index, row in enumerate(rows)]
        turns = [make_turn(make_completion(answer, 0.0), prompt) for answer in answers]
        groups.append(
            group(*(make_trajectory(turn, score=index % 2, sample=index) for index, turn in enumerate(turns)))
        )
    return groups


@pytest.mark.parametrize("attention", ["padded", "sdpa"])
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_prefetched_log_probs_equal_those_of_the_loaded_batch(tmp_path: Path, attention: str, lora_rank: int) -> None:
    """Up to rounding; bit for bit the same in any order."""
    folder = str(save_model("qwen3", tmp_path))
    case = Case(folder, attention=attention, needs_reference=True, lora_rank=lora_rank)
    worker = make_worker(case, 0, 1, free_address())
    groups = real_groups()
    batch = build(groups)
    worker.load_batch(batch.layout.rank_batches[0])
    expected = batch.layout.join_columns([worker.compute_ref_log_probs()])

    def found(ended: Sequence[TrajectoryGroup], together: int, shares_prompts: bool) -> np.ndarray:
        async def run() -> np.ndarray:
            policy = PolicyGroup(LocalRanks(worker))
            reference = ReferencePrefetcher(policy, 1, 60, attention == "padded", shares_prompts)
            await reference.prefetch_during(played(reference, ended, together))
            return await reference.get_logprobs(groups, batch)

        return asyncio.run(run())

    for shares in (False, True):
        one_by_one = found(groups, 1, shares)
        np.testing.assert_allclose(one_by_one, expected, atol=2e-6)
        np.testing.assert_array_equal(found(groups[::-1], 4, shares), one_by_one)
        np.testing.assert_array_equal(found([], 1, shares), one_by_one)
    np.testing.assert_array_equal(batch.layout.join_columns([worker.compute_ref_log_probs()]), expected)  # still loaded
    worker.close()
