"""How rows become mini-batches, ranks and micro-batches: pure functions on lengths, the same on every machine.

trajectories --split_mini_batches--> optimiser steps --balance--> ranks --micro_batches--> forward passes
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from alphaapollo.data.batch import MiniBatch, RankBatch, Rows, TrainBatch
from alphaapollo.seeds import derive_seed
from alphaapollo.types import Row


def build_train_batch(
    rows: Sequence[Row],
    trajectory_ids: Sequence[int],
    num_ranks: int,
    mini_batch_size: int,
    max_tokens: int,
    padded: bool,
    seed: int,
    shuffle: bool,
    group_ids: Sequence[int] | None = None,
    whole_trajectories: bool = False,
) -> TrainBatch:
    """Freeze the layout of one iteration.

    Args:
        rows: the B rows to train on.
        trajectory_ids: [B], the trajectory of each row, 0 .. N-1; rows of one trajectory share a mini-batch.
        mini_batch_size: trajectories an optimiser step, over all ranks.
        max_tokens: of one micro-batch on one rank; with `padded`, its rows x its longest row.
        seed: of the shuffle, usually derive_seed(run seed, "mini_batches", step).
        group_ids: [N], the group of each trajectory, 0 .. G-1, where groups must share a mini-batch too.
        whole_trajectories: rows of one trajectory share a micro-batch, even where they exceed max_tokens.
    """
    members = _members(trajectory_ids)
    bundles = [[trajectory] for trajectory in range(len(members))] if group_ids is None else _members(group_ids)
    count = min(-(-len(members) // mini_batch_size), len(bundles))
    mini_batches_of_trajectories = [
        [trajectory for bundle in part for trajectory in bundles[bundle]]
        for part in split_mini_batches(len(bundles), count, seed, shuffle)
    ]
    orders: list[list[int]] = [[] for _ in range(num_ranks)]
    mini_batches: list[list[MiniBatch]] = [[] for _ in range(num_ranks)]
    for trajectories in mini_batches_of_trajectories:
        parts = [members[trajectory] for trajectory in trajectories]
        parts = parts if whole_trajectories else [[row] for part in parts for row in part]
        lengths = [[len(rows[row].token_ids) for row in part] for part in parts]
        shares = balance([sum(own) for own in lengths], num_ranks)
        micros = equal_micro_batches([[lengths[i] for i in share] for share in shares], max_tokens, padded)
        for rank, (share, rank_micros) in enumerate(zip(shares, micros, strict=True)):
            walked = [[row for i in micro for row in parts[share[i]]] for micro in rank_micros]
            mini_batches[rank].append(MiniBatch(_number_from(len(orders[rank]), walked)))
            orders[rank].extend(row for micro in walked for row in micro)
    return TrainBatch(
        rank_batches=[
            RankBatch(Rows.from_rows([rows[row] for row in order]), steps)
            for order, steps in zip(orders, mini_batches, strict=True)
        ],
        row_order=[np.array(order, dtype=np.int64) for order in orders],
        mini_batch_rows=[[row for one in part for row in members[one]] for part in mini_batches_of_trajectories],
    )


def _members(owners: Sequence[int]) -> list[list[int]]:
    """The positions of each owner 0, 1, .."""
    members: list[list[int]] = [[] for _ in range(max(owners, default=-1) + 1)]
    for position, owner in enumerate(owners):
        members[owner].append(position)
    return members


def split_mini_batches(num_bundles: int, count: int, seed: int, shuffle: bool) -> list[list[int]]:
    """Deal 0 .. num_bundles-1 into `count` mini-batches whose sizes differ by one at most (no tiny last one)."""
    order = np.arange(num_bundles)
    if shuffle:
        np.random.default_rng(derive_seed(seed, "split_mini_batches")).shuffle(order)
    return [part.tolist() for part in np.array_split(order, count)] if count else []


def balance(lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Deal rows to ranks with near-equal tokens: the longest first, each to the rank with the fewest so far.

    Returns row indices a rank, longest first. Loads differ by one row's length at most.
    """
    loads = [(0, rank) for rank in range(num_ranks)]
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    for index in _longest_first(lengths):
        load, rank = loads[0]
        shares[rank].append(index)
        heapq.heapreplace(loads, (load + lengths[index], rank))
    return shares


def micro_batches(lengths: Sequence[Sequence[int]], max_tokens: int, padded: bool) -> list[list[int]]:
    """Cut one rank's parts, sorted longest first, into micro-batches of at most max_tokens; indices of parts.

    A part is what stays together, by the lengths of its rows: usually one row. A micro-batch costs its sum of lengths,
    or with `padded` its number of rows times its longest row. A part over max_tokens is a micro-batch of its own.
    """
    batches: list[list[int]] = []
    num_rows = tokens = longest = 0
    for index in _longest_first([max(part) if padded else sum(part) for part in lengths]):
        part = lengths[index]
        cost = (num_rows + len(part)) * longest if padded else tokens + sum(part)
        if not batches or cost > max_tokens:
            batches.append([])
            num_rows, tokens, longest = 0, 0, max(part)
        batches[-1].append(index)
        num_rows, tokens = num_rows + len(part), tokens + sum(part)
    return batches


def equal_micro_batches(
    ranks_lengths: Sequence[Sequence[Sequence[int]]], max_tokens: int, padded: bool
) -> list[list[list[int]]]:
    """micro_batches for each rank, and equally many for all (at least one): a rank with fewer halves its fullest
    ones, then adds empty ones."""
    ranks = [micro_batches(lengths, max_tokens, padded) for lengths in ranks_lengths]
    count = max([1, *map(len, ranks)])
    return [_split_until(batches, count) for batches in ranks]


def _split_until(batches: list[list[int]], count: int) -> list[list[int]]:
    batches = list(batches)
    while len(batches) < count:
        fullest = max(range(len(batches)), key=lambda i: len(batches[i]), default=None)
        if fullest is None or len(batches[fullest]) < 2:
            return batches + [[] for _ in range(count - len(batches))]
        batch = batches[fullest]
        batches[fullest : fullest + 1] = [batch[: len(batch) // 2], batch[len(batch) // 2 :]]
    return batches


def _number_from(first: int, batches: list[list[int]]) -> list[list[int]]:
    """Consecutive positions in the shape of `batches`: rows are stored in the order in which they are walked."""
    numbered = []
    for batch in batches:
        numbered.append(list(range(first, first + len(batch))))
        first += len(batch)
    return numbered


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda i: -lengths[i])
