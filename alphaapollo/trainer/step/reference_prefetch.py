"""Prefetch reference log-probs: compute them for finished rollout groups while other groups are still generated.

group ends -> add_group -> one training rank computes its log-probs -> get_logprobs, when the batch is complete

Each group has its own micro-batches, so the rounding of its log-probs does not depend on when it ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import NoReturn, TypeVar

import numpy as np

from alphaapollo.controller.handles import PolicyGroup
from alphaapollo.data.batch import MiniBatch, RankBatch, Rows
from alphaapollo.data.packing import build_train_batch
from alphaapollo.data.shared_prompts import find_shared_prefixes
from alphaapollo.trainer.step.training_batch import Batch
from alphaapollo.types import Row, TrajectoryGroup

T = TypeVar("T")
NO_ROWS = RankBatch(Rows.from_rows([]), [MiniBatch([])])


class ReferencePrefetcher:
    """Queue of finished rollout groups whose reference log-probs are computed during generation.

    Worker calls are sequential, because collectives need the same order on all ranks.

    Args:
        num_ranks: number of data-parallel ranks. One worker call computes at most one group per rank.
        max_tokens: maximum tokens of a micro-batch.
        padded: whether micro-batches are padded to their longest row.
        shares_prompts: whether to compute the common prefix of a group's rows once, if this saves enough tokens.
    """

    def __init__(self, policy: PolicyGroup, num_ranks: int, max_tokens: int, padded: bool, shares_prompts: bool):
        self._policy, self._num_ranks, self._max_tokens = policy, num_ranks, max_tokens
        self._padded, self._shares_prompts = padded, shares_prompts
        self._queue: asyncio.Queue[TrajectoryGroup] = asyncio.Queue()
        self._columns: dict[int, tuple[Row, np.ndarray]] = {}  # by id(row); the reference to the row keeps it unique
        self._added = self._computed = self._late = 0  # numbers of groups since the last pop_metrics

    def add_group(self, group: TrajectoryGroup) -> None:
        """Queue a finished group for `prefetch_during`."""
        self._added += 1
        self._queue.put_nowait(group)

    async def wait_until_idle(self) -> None:
        """Wait until the log-probs of all added groups are computed and no worker call is active."""
        await self._queue.join()

    async def prefetch_during(self, generating: Coroutine[object, object, T]) -> T:
        """Await `generating`, compute the log-probs of groups as they are added, and return the result of `generating`.

        If generation or a computation raises, the other one is cancelled.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                prefetching = tasks.create_task(self._compute_logprobs_of_queued_groups())
                generated = await generating
                self._late += self._added - self._computed
                await self.wait_until_idle()
                prefetching.cancel()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        return generated

    async def get_logprobs(self, groups: Sequence[TrajectoryGroup], batch: Batch) -> np.ndarray:
        """Return the reference log-probs [n] of `batch`, built from `groups`. Computes those not computed before."""
        missing = [group for group in groups if any(id(row) not in self._columns for row in _list_rows(group))]
        for first in range(0, len(missing), self._num_ranks):
            await self._compute_group_logprobs(missing[first : first + self._num_ranks])
        logprobs = np.concatenate([self._columns[id(row)][1] for row in batch.rows])
        self._columns.clear()
        return logprobs

    def pop_metrics(self) -> dict[str, float]:
        """Return the share of groups since the last call whose log-probs were computed before generation ended."""
        share = 1 - self._late / self._added if self._added else 0.0
        self._added = self._computed = self._late = 0
        return {"perf/reference_ahead": share}

    async def _compute_logprobs_of_queued_groups(self) -> NoReturn:
        """Compute the reference log-probs of queued groups until this task is cancelled."""
        while True:
            groups = [await self._queue.get()]
            while len(groups) < self._num_ranks and not self._queue.empty():
                groups.append(self._queue.get_nowait())
            await self._compute_group_logprobs(groups)
            self._computed += len(groups)
            for _ in groups:
                self._queue.task_done()

    async def _compute_group_logprobs(self, groups: Sequence[TrajectoryGroup]) -> None:
        batches, rows = zip(*(self._build_rank_batch(_list_rows(group)) for group in groups), strict=True)
        columns = await self._policy.compute_ref_log_probs(self._add_empty_micro_batches(batches))
        for batch, group_rows, column in zip(batches, rows, columns, strict=False):  # further ranks have no rows
            parts = np.split(column, batch.rows.response_offsets[1:-1])
            self._columns |= {id(row): (row, part) for row, part in zip(group_rows, parts, strict=True)}

    def _build_rank_batch(self, rows: list[Row]) -> tuple[RankBatch, list[Row]]:
        """Build a batch for one rank from one group's sequences. Also returns the sequences in the batch's order."""
        layout = build_train_batch(
            rows,
            range(len(rows)),
            num_ranks=1,
            mini_batch_size=len(rows),
            max_tokens=self._max_tokens,
            padded=self._padded,
            prefixes=find_shared_prefixes(rows, [0] * len(rows)) if self._shares_prompts else None,
        )
        return layout.rank_batches[0], [rows[index] for index in layout.row_order[0]]

    def _add_empty_micro_batches(self, batches: Sequence[RankBatch]) -> list[RankBatch]:
        """Return one batch per rank, all with the same number of micro-batches, as collectives require."""
        count = max(len(batch.mini_batches[0].micro_batches) for batch in batches)
        filled = []
        for batch in [*batches, *[NO_ROWS] * (self._num_ranks - len(batches))]:
            micro_batches = batch.mini_batches[0].micro_batches
            empty: list[list[int]] = [[] for _ in range(count - len(micro_batches))]
            filled.append(RankBatch(batch.rows, [MiniBatch(micro_batches + empty)]))
        return filled


def _list_rows(group: TrajectoryGroup) -> list[Row]:
    """Return all token sequences of the group, also of trajectories that a reward model may mark as failed later.

    The group's micro-batches are therefore the same at every call.
    """
    return [row for one in group.trajectories for row in one.rows]
