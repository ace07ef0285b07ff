"""Prefetch of reference log-probs: computed for finished groups while others are still generated.

a group ends -> add -> one training rank computes it in micro-batches of its own -> to_matrix, for the whole batch

Rounding depends on the group alone: not on when it ended, nor on which groups ended with it.
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
class _GroupBatch:
    """Rows of one group as a batch of one rank."""

    batch: RankBatch
    rows: list[Row]  # in the batch's order


class ReferencePrefetcher:
    """Computes reference log-probs per group. Its worker calls are sequential: collectives need one order on all ranks.

    Args:
        num_ranks: data-parallel ranks; a call takes that many groups, one per rank.
        max_tokens: of a micro-batch.
        padded: micro-batches are padded to their longest row.
        shares_prompts: compute the common prefix of a group's rows once, where that saves enough.
    """

    def __init__(self, policy: PolicyGroup, num_ranks: int, max_tokens: int, padded: bool, shares_prompts: bool):
        self._policy, self._num_ranks, self._max_tokens = policy, num_ranks, max_tokens
        self._padded, self._shares_prompts = padded, shares_prompts
        self._queue: asyncio.Queue[TrajectoryGroup] = asyncio.Queue()
        self._columns: dict[int, tuple[Row, np.ndarray]] = {}  # by id of the row, which is kept alive
        self._added = self._computed = self._late = 0  # groups, since the last take_metrics

    def add(self, group: TrajectoryGroup) -> None:
        """Queue a finished group; `run_beside` computes it."""
        self._added += 1
        self._queue.put_nowait(group)

    async def settle(self) -> None:
        """Wait until all added groups are computed and no worker call is active."""
        await self._queue.join()

    async def run_beside(self, generating: Coroutine[Any, Any, T]) -> T:
        """Return the result of `generating` when all groups added meanwhile are computed. A failure ends both."""
        work = asyncio.ensure_future(self._work())
        whole = asyncio.ensure_future(self._settle_after(generating))
        try:
            await asyncio.wait([work, whole], return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            return await whole
        finally:
            for task in (work, whole):
                task.cancel()
            await asyncio.gather(work, whole, return_exceptions=True)

    async def to_matrix(self, groups: Sequence[TrajectoryGroup], batch: Batch) -> np.ndarray:
        """Log-probs of all rows of the batch built from `groups` [B, L]. Missing ones, as in a replay, are computed."""
        missing = [group for group in groups if any(id(row) not in self._columns for row in _rows(group))]
        for first in range(0, len(missing), self._num_ranks):
            await self._compute(missing[first : first + self._num_ranks])
        parts = [self._columns[id(row)][1] for row in batch.rows]
        matrix = np.zeros((len(parts), batch.layout.max_response_length), np.result_type(*parts))
        for values, part in zip(matrix, parts, strict=True):
            values[: len(part)] = part
        self._columns.clear()
        return matrix

    def take_metrics(self) -> dict[str, float]:
        """Share of the groups that were computed before the last one was generated, since the last call."""
        share = 1 - self._late / self._added if self._added else 0.0
        self._added = self._computed = self._late = 0
        return {"perf/reference_ahead": share}

    async def _settle_after(self, generating: Coroutine[Any, Any, T]) -> T:
        generated = await generating
        self._late += self._added - self._computed
        await self.settle()
        return generated

    async def _work(self) -> NoReturn:
        while True:
            groups = [await self._queue.get()]
            while len(groups) < self._num_ranks and not self._queue.empty():
                groups.append(self._queue.get_nowait())
            await self._compute(groups)
            self._computed += len(groups)
            for _ in groups:
                self._queue.task_done()

    async def _compute(self, groups: Sequence[TrajectoryGroup]) -> None:
        batches = [self._build_batch(_rows(group)) for group in groups]
        columns = await self._policy.compute_ref_log_probs(self._fill_ranks([one.batch for one in batches]))
        for one, column in zip(batches, columns, strict=False):  # the other ranks have no rows
            parts = np.split(column, one.batch.rows.response_offsets[1:-1])
            self._columns |= {id(row): (row, part) for row, part in zip(one.rows, parts, strict=True)}

    def _build_batch(self, rows: list[Row]) -> _GroupBatch:
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
        return _GroupBatch(layout.rank_batches[0], [rows[index] for index in layout.row_order[0]])

    def _fill_ranks(self, batches: Sequence[RankBatch]) -> list[RankBatch]:
        """One batch per rank, each with the same number of forward passes; empty micro-batches compute on dummies."""
        count = max(len(batch.mini_batches[0].micro_batches) for batch in batches)
        nothing = RankBatch(Rows.from_rows([]), [MiniBatch([])])
        all_ranks = [*batches, *[nothing] * (self._num_ranks - len(batches))]
        return [RankBatch(one.rows, [_pad_to(count, one.mini_batches[0].micro_batches)]) for one in all_ranks]


def _pad_to(count: int, micro_batches: list[list[int]]) -> MiniBatch:
    return MiniBatch([*micro_batches, *([] for _ in range(count - len(micro_batches)))])


def _rows(group: TrajectoryGroup) -> list[Row]:
    """All rows of the group. Those that fail later are included, so its micro-batches never change."""
    return [row for one in group.trajectories for row in one.rows]
