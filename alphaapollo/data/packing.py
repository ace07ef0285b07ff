"""Distribute rows to mini-batches, ranks and micro-batches: deterministic pure functions on lengths.

trajectories --split_mini_batches--> optimizer steps --balance_ranks--> ranks --split_micro_batches--> forward passes

A part is a set of rows that must be in one micro-batch: a row, the rows of a trajectory, or rows that share a prefix.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from alphaapollo.data.batch import MiniBatch, RankBatch, Rows, TrainBatch
from alphaapollo.data.shared_prompts import SharedPrefixes
from alphaapollo.types import Row
from alphaapollo.utils.seeds import derive_seed

MAX_IMBALANCE = 1.1  # ratio of largest to mean rank load above which families that share a prefix are split


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
    needs_full_trajectories: bool = False,
    prefixes: SharedPrefixes | None = None,
    min_sharing_ratio: float = 0.0,
) -> TrainBatch:
    """Build the layout of one iteration.

    Args:
        rows: B rows to train on.
        trajectory_ids: [B] trajectory of each row, 0 .. N-1; rows of one trajectory share a mini-batch.
        num_ranks: number of training ranks.
        mini_batch_size: trajectories per optimizer step, over all ranks.
        max_tokens: maximum tokens of one micro-batch on one rank. Shared prefixes count once.
        padded: rows are padded to the longest row of the micro-batch, and padding counts.
        seed: seed of the shuffle, usually derive_seed(run seed, "mini_batches", step).
        shuffle: shuffle trajectories (or groups) before they are split into mini-batches.
        group_ids: [N] group of each trajectory, 0 .. G-1, if mini-batches must not split groups.
        needs_full_trajectories: rows of one trajectory share a micro-batch, even if they exceed max_tokens.
        prefixes: shared prefixes of the B rows, which are computed once. Rows are not padded then.
        min_sharing_ratio: prefixes are shared only if row tokens / computed tokens is at least this ratio.
    """
    members, lengths = _group_positions(trajectory_ids), [len(row.token_ids) for row in rows]
    bundles = [[trajectory] for trajectory in range(len(members))] if group_ids is None else _group_positions(group_ids)
    count = min(-(-len(members) // mini_batch_size), len(bundles))
    step_trajectories = [
        [trajectory for bundle in part for trajectory in bundles[bundle]]
        for part in split_mini_batches(len(bundles), count, seed, shuffle)
    ]
    steps = [_make_bundles(trajectories, members, needs_full_trajectories) for trajectories in step_trajectories]
    split = [_split_step(rows_of_step, lengths, prefixes, num_ranks, max_tokens) for rows_of_step in steps]
    if prefixes is not None and sum(lengths) < min_sharing_ratio * sum(
        part.cost for parts, _ in split for part in parts
    ):
        prefixes, split = None, [_split_step(one, lengths, None, num_ranks, max_tokens) for one in steps]
    orders: list[list[int]] = [[] for _ in range(num_ranks)]
    mini_batches: list[list[MiniBatch]] = [[] for _ in range(num_ranks)]
    for parts, shares in split:
        costs = [[parts[i].costs for i in share] for share in shares]
        micros = split_micro_batches_on_ranks(costs, max_tokens, padded and prefixes is None)
        for rank, (share, rank_micros) in enumerate(zip(shares, micros, strict=True)):
            mini_batches[rank].append(_append_rows([parts[i].rows for i in share], rank_micros, orders[rank]))
    return TrainBatch(
        rank_batches=[
            RankBatch(Rows.from_rows([rows[row] for row in order], prefixes and prefixes.select(order)), steps)
            for order, steps in zip(orders, mini_batches, strict=True)
        ],
        row_order=[np.array(order, dtype=np.int64) for order in orders],
        mini_batch_rows=[[row for trajectory in step for row in members[trajectory]] for step in step_trajectories],
    )


def _append_rows(parts: Sequence[Sequence[int]], micros: Sequence[Sequence[int]], order: list[int]) -> MiniBatch:
    """Append the rows of a mini-batch to a rank's `order`, one micro-batch after the other. Return their positions."""
    positions = []
    for micro in micros:
        first = len(order)
        order += [row for i in micro for row in parts[i]]
        positions.append(list(range(first, len(order))))
    return MiniBatch(positions)


def filter_mini_batches(batch: TrainBatch, keep: np.ndarray, max_tokens: int, padded: bool) -> list[list[MiniBatch]]:
    """Remove rows from the mini-batches of each rank, and join small micro-batches. Returns mini-batches per rank.

    Args:
        keep: bool [B], True for rows to keep.
        max_tokens: maximum tokens of one micro-batch on one rank.
        padded: rows without prefixes are padded to the longest row.

    All ranks run the same number of forward passes. An optimizer step without rows is not removed.
    """
    if keep.all():
        return [rank.mini_batches for rank in batch.rank_batches]
    ranks = []
    for rank, order in zip(batch.rank_batches, batch.row_order, strict=True):
        mask, steps = keep[order], rank.mini_batches
        ranks.append([_join_micro_batches(rank.rows, step, mask, max_tokens, padded) for step in steps])
    counts = [max(1, *map(len, micros)) for micros in zip(*ranks, strict=True)]
    return [
        [MiniBatch(micros + [[]] * (count - len(micros))) for micros, count in zip(rank, counts, strict=True)]
        for rank in ranks
    ]


def _join_micro_batches(
    rows: Rows, mini_batch: MiniBatch, keep: np.ndarray, max_tokens: int, padded: bool
) -> list[list[int]]:
    micros: list[list[int]] = []
    for micro in mini_batch.micro_batches:
        positions = [position for position in micro if keep[position]]
        if micros and positions and rows.count_computed_tokens(micros[-1] + positions, padded) <= max_tokens:
            micros[-1] += positions
        elif positions:
            micros.append(positions)
    return micros


def _make_bundles(trajectories: list[int], members: list[list[int]], needs_full_trajectories: bool) -> list[list[int]]:
    """Group the rows of trajectories into bundles that must stay together: trajectories, or single rows."""
    bundles = [members[trajectory] for trajectory in trajectories]
    return bundles if needs_full_trajectories else [[row] for bundle in bundles for row in bundle]


@dataclass(frozen=True)
class _Part:
    """Rows that stay together, and their costs in tokens: one per row, or one per prefix and remainder of a row."""

    rows: list[int]
    costs: list[int]

    @property
    def cost(self) -> int:
        return sum(self.costs)


def _split_step(
    bundles: list[list[int]], lengths: list[int], prefixes: SharedPrefixes | None, num_ranks: int, max_tokens: int
) -> tuple[list[_Part], list[list[int]]]:
    """Split one optimizer step into parts and distribute them. Returns the parts, and indices of parts for each rank.

    bundles: rows that must stay together. A family with a shared prefix is split until each part is within max_tokens
    and the loads of the ranks are balanced.
    """
    if prefixes is None or any(len(bundle) > 1 for bundle in bundles):
        parts = [_Part(bundle, _compute_costs(bundle, lengths, prefixes)) for bundle in bundles]
        return parts, balance_ranks([part.cost for part in parts], num_ranks)
    ids, shared, limit = prefixes.prefix_ids.tolist(), prefixes.lengths.tolist(), max_tokens
    rows = sorted((bundle[0] for bundle in bundles), key=lambda row: (ids[row], -lengths[row]))
    while True:
        parts = _split_families(rows, lengths, ids, shared, limit)
        costs = [part.cost for part in parts]
        max_total_load = MAX_IMBALANCE * sum(costs)
        # a part above this load makes every distribution unbalanced
        if max(costs, default=0) * num_ranks <= max_total_load or len(parts) == len(rows):
            shares = balance_ranks(costs, num_ranks)
            largest = max(sum(costs[i] for i in share) for share in shares)
            if largest * num_ranks <= max_total_load or len(parts) == len(rows):
                return parts, shares
        limit //= 2


def _compute_costs(rows: list[int], lengths: list[int], prefixes: SharedPrefixes | None) -> list[int]:
    """Return the cost in tokens of each row, or of each shared prefix and the remainder of each row."""
    if prefixes is None:
        return [lengths[row] for row in rows]
    shared = {int(prefixes.prefix_ids[row]): int(prefixes.lengths[row]) for row in rows}
    return [*shared.values(), *(lengths[row] - int(prefixes.lengths[row]) for row in rows)]


def _split_families(rows: list[int], lengths: list[int], ids: list[int], shared: list[int], limit: int) -> list[_Part]:
    """Group rows, sorted by family, into parts of one family and at most `limit` tokens."""
    parts: list[_Part] = []
    family, cost = -1, 0
    for row in rows:
        rest = lengths[row] - shared[row]
        if ids[row] == family and cost + rest <= limit:
            parts[-1].rows.append(row)
            parts[-1].costs.append(rest)
            cost += rest
        else:
            parts.append(_Part([row], [shared[row], rest]))
            family, cost = ids[row], lengths[row]
    return parts


def _group_positions(owners: Sequence[int]) -> list[list[int]]:
    """Return the positions at which each owner 0, 1, .. occurs."""
    members: list[list[int]] = [[] for _ in range(max(owners, default=-1) + 1)]
    for position, owner in enumerate(owners):
        members[owner].append(position)
    return members


def split_mini_batches(num_bundles: int, count: int, seed: int, shuffle: bool) -> list[list[int]]:
    """Split 0 .. num_bundles-1 into `count` mini-batches whose sizes differ by at most one."""
    order = np.arange(num_bundles)
    if shuffle:
        np.random.default_rng(derive_seed(seed, "split_mini_batches")).shuffle(order)
    return [part.tolist() for part in np.array_split(order, count)] if count else []


def balance_ranks(lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Distribute rows to ranks, longest first, each to the rank with the fewest tokens.

    Returns row indices for each rank, longest first. Loads differ by at most the length of one row.
    """
    loads = [(0, rank) for rank in range(num_ranks)]
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    for index in _sort_longest_first(lengths):
        load, rank = loads[0]
        shares[rank].append(index)
        heapq.heapreplace(loads, (load + lengths[index], rank))
    return shares


def split_micro_batches(lengths: Sequence[Sequence[int]], max_tokens: int, padded: bool) -> list[list[int]]:
    """Split the parts of one rank, longest first, into micro-batches of at most max_tokens. Returns indices of parts.

    lengths: for each part, the lengths of rows that stay together. A micro-batch costs the sum of lengths, or with
    `padded` the number of rows times the longest row. A part over max_tokens is a micro-batch by itself.
    """
    batches: list[list[int]] = []
    num_rows = tokens = longest = 0
    for index in _sort_longest_first([max(part) if padded else sum(part) for part in lengths]):
        part = lengths[index]
        cost = (num_rows + len(part)) * longest if padded else tokens + sum(part)
        if not batches or cost > max_tokens:
            batches.append([])
            num_rows, tokens, longest = 0, 0, max(part)
        batches[-1].append(index)
        num_rows, tokens = num_rows + len(part), tokens + sum(part)
    return batches


def split_micro_batches_on_ranks(
    ranks_lengths: Sequence[Sequence[Sequence[int]]], max_tokens: int, padded: bool
) -> list[list[list[int]]]:
    """Split the parts of each rank into micro-batches, the same number (at least one) on every rank.

    A rank with fewer micro-batches splits its largest ones. If that is not enough, it adds empty ones.
    """
    ranks = [split_micro_batches(lengths, max_tokens, padded) for lengths in ranks_lengths]
    count = max([1, *map(len, ranks)])
    return [_split_to_count(batches, count) for batches in ranks]


def _split_to_count(batches: list[list[int]], count: int) -> list[list[int]]:
    batches = list(batches)
    while len(batches) < count:
        fullest = max(range(len(batches)), key=lambda i: len(batches[i]), default=None)
        if fullest is None or len(batches[fullest]) < 2:
            return batches + [[] for _ in range(count - len(batches))]
        batch = batches[fullest]
        batches[fullest : fullest + 1] = [batch[: len(batch) // 2], batch[len(batch) // 2 :]]
    return batches


def _sort_longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda i: -lengths[i])
