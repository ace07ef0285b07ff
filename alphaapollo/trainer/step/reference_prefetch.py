"""Prefetch of reference log-probs: computed for finished groups while others are still generated.

a group ends -> add -> one training rank computes it in micro-batches of its own -> to_matrix, for the whole batch

Rounding depends on the group alone: not on when it ended, nor on which groups ended with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, NoReturn, TypeVar

import numpy as np

from alphaapollo.controller.handles import PolicyGroup
from alphaapollo.data.batch import MiniBatch, RankBatch, Rows
from alphaapollo.data.packing import build_train_batch
from alphaapollo.data.shared_prompts import SHARE_FROM, find_prefixes
from alphaapollo.trainer.step.training_batch import Batch
from alphaapollo.types import Row, TrajectoryGroup

T = TypeVar("T")
NO_ROWS = RankBatch(Rows.from_rows([]), [MiniBatch([])])


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
        try:
            async with asyncio.TaskGroup() as tasks:
                work = tasks.create_task(self._work())
                generated = await generating
                self._late += self._added - self._computed
                await self.settle()
                work.cancel()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        return generated

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
        batches, rows = zip(*(self._build_batch(_rows(group)) for group in groups), strict=True)
        columns = await self._policy.compute_ref_log_probs(self._fill_ranks(batches))
        for batch, own, column in zip(batches, rows, columns, strict=False):  # the other ranks have no rows
            parts = np.split(column, batch.rows.response_offsets[1:-1])
            self._columns |= {id(row): (row, part) for row, part in zip(own, parts, strict=True)}

    def _build_batch(self, rows: list[Row]) -> tuple[RankBatch, list[Row]]:
        """Rows of one group as a batch of one rank, and in the order of that batch."""
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
        return layout.rank_batches[0], [rows[index] for index in layout.row_order[0]]

    def _fill_ranks(self, batches: Sequence[RankBatch]) -> list[RankBatch]:
        """One batch per rank, each with the same number of forward passes; empty micro-batches compute on dummies."""
        count = max(len(batch.mini_batches[0].micro_batches) for batch in batches)
        filled = []
        for batch in [*batches, *[NO_ROWS] * (self._num_ranks - len(batches))]:
            micro_batches = batch.mini_batches[0].micro_batches
            empty: list[list[int]] = [[] for _ in range(count - len(micro_batches))]
            filled.append(RankBatch(batch.rows, [MiniBatch(micro_batches + empty)]))
        return filled


def _rows(group: TrajectoryGroup) -> list[Row]:
    """All rows of the group. Those that fail later are included, so its micro-batches never change."""
    return [row for one in group.trajectories for row in one.rows]
