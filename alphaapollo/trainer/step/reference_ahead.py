"""The reference's log-probs of groups that have ended, while others are still played.

a group ends -> add -> one training rank computes it, in micro-batches of its own -> matrix, of the whole batch

So what they round to depends on the group alone: not on when it ended, nor on who ended with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import numpy as np

from alphaapollo.controller.handles import PolicyGroup
from alphaapollo.data.batch import MiniBatch, RankBatch, Rows
from alphaapollo.data.packing import build_train_batch
from alphaapollo.data.shared_prompts import SHARE_FROM, find_prefixes
from alphaapollo.trainer.step.training_batch import Batch
from alphaapollo.types import Row, TrajectoryGroup

T = TypeVar("T")


@dataclass(frozen=True)
class _Dealt:
    """A group's rows, as the rank gets them that computes them."""

    batch: RankBatch
    rows: list[Row]  # in the batch's order


class ReferenceAhead:
    """Its calls of the policy's workers are made one after the other: collectives need one order on all ranks.

    Args:
        num_ranks: with rows of their own: so many groups a call, one each.
        max_tokens: of a micro-batch.
        padded: micro-batches are padded to their longest row.
        shares_prompts: compute what rows of a group have in common once, where that saves enough.
    """

    def __init__(self, policy: PolicyGroup, num_ranks: int, max_tokens: int, padded: bool, shares_prompts: bool):
        self._policy, self._num_ranks, self._max_tokens = policy, num_ranks, max_tokens
        self._padded, self._shares_prompts = padded, shares_prompts
        self._ended: asyncio.Queue[TrajectoryGroup] = asyncio.Queue()
        self._columns: dict[int, tuple[Row, np.ndarray]] = {}  # by the id of the row, which is kept alive
        self._added = self._scored = self._late = 0  # groups, since the figures were last asked for

    def add(self, group: TrajectoryGroup) -> None:
        """It has ended; `beside` computes it."""
        self._added += 1
        self._ended.put_nowait(group)

    async def settle(self) -> None:
        """All that was added is computed: no call of a worker is under way."""
        await self._ended.join()

    async def beside(self, playing: Coroutine[Any, Any, T]) -> T:
        """What `playing` returns, when all that it has added is computed. The first failure of either ends both."""
        work = asyncio.ensure_future(self._work())
        whole = asyncio.ensure_future(self._played_and_settled(playing))
        try:
            await asyncio.wait([work, whole], return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            return await whole
        finally:
            for task in (work, whole):
                task.cancel()
            await asyncio.gather(work, whole, return_exceptions=True)

    async def matrix(self, groups: Sequence[TrajectoryGroup], batch: Batch) -> np.ndarray:
        """Of all rows of the batch that was made of `groups`. What is not there yet, as in a replay, is computed now.
        [B, L]"""
        missing = [group for group in groups if any(id(row) not in self._columns for row in _rows(group))]
        for first in range(0, len(missing), self._num_ranks):
            await self._score(missing[first : first + self._num_ranks])
        parts = [self._columns[id(row)][1] for row in batch.rows]
        matrix = np.zeros((len(parts), batch.layout.max_response_length), np.result_type(*parts))
        for values, part in zip(matrix, parts, strict=True):
            values[: len(part)] = part
        self._columns.clear()
        return matrix

    def figures(self) -> dict[str, float]:
        """The share of the groups that were computed before the last one had ended, since last asked."""
        share = 1 - self._late / self._added if self._added else 0.0
        self._added = self._scored = self._late = 0
        return {"perf/reference_ahead": share}

    async def _played_and_settled(self, playing: Coroutine[Any, Any, T]) -> T:
        played = await playing
        self._late += self._added - self._scored
        await self.settle()
        return played

    async def _work(self) -> NoReturn:
        while True:
            groups = [await self._ended.get()]
            while len(groups) < self._num_ranks and not self._ended.empty():
                groups.append(self._ended.get_nowait())
            await self._score(groups)
            self._scored += len(groups)
            for _ in groups:
                self._ended.task_done()

    async def _score(self, groups: Sequence[TrajectoryGroup]) -> None:
        dealt = [self._deal(_rows(group)) for group in groups]
        columns = await self._policy.compute_ref_log_probs(self._for_all([one.batch for one in dealt]))
        for one, column in zip(dealt, columns, strict=False):  # the other ranks have none
            parts = np.split(column, one.batch.rows.response_offsets[1:-1])
            self._columns |= {id(row): (row, part) for row, part in zip(one.rows, parts, strict=True)}

    def _deal(self, rows: list[Row]) -> _Dealt:
        layout = build_train_batch(
            rows,
            range(len(rows)),
            num_ranks=1,
            mini_batch_size=len(rows),
            max_tokens=self._max_tokens,
            padded=self._padded,
            seed=0,
            shuffle=False,
            prefixes=find_prefixes(rows, [0] * len(rows)) if self._shares_prompts else None,
            share_from=SHARE_FROM,
        )
        return _Dealt(layout.rank_batches[0], [rows[index] for index in layout.row_order[0]])

    def _for_all(self, batches: Sequence[RankBatch]) -> list[RankBatch]:
        """One a rank, with equally many forward passes: those that have less to do compute on dummies."""
        count = max(len(batch.mini_batches[0].micro_batches) for batch in batches)
        nothing = RankBatch(Rows.from_rows([]), [MiniBatch([])])
        whole = [*batches, *[nothing] * (self._num_ranks - len(batches))]
        return [RankBatch(one.rows, [_up_to(count, one.mini_batches[0].micro_batches)]) for one in whole]


def _up_to(count: int, micro_batches: list[list[int]]) -> MiniBatch:
    return MiniBatch([*micro_batches, *([] for _ in range(count - len(micro_batches)))])


def _rows(group: TrajectoryGroup) -> list[Row]:
    """All of the group, also of those that fail later on: its micro-batches are the same then."""
    return [row for one in group.trajectories for row in one.rows]
