"""Distribute token sequences (rows) to mini-batches, ranks and micro-batches, given their lengths and a seed.

trajectories --split_mini_batches--> optimizer steps --balance_ranks--> ranks --split_micro_batches--> forward passes

A bundle is a set of rows that must be in one micro-batch: a row, the rows of a trajectory, or rows that share a prefix.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

import numpy as np

from alphaapollo.batching.batch import BatchLayout, MiniBatch, RankBatch, Rows
from alphaapollo.batching.shared_prompts import MIN_SHARING_RATIO, SharedPrompts, find_shared_prompts
from alphaapollo.data.preference_examples import PreferenceExample
from alphaapollo.types import Row
from alphaapollo.utils.seeds import derive_seed

MAX_IMBALANCE = 1.1  # ratio of largest to mean rank load above which rows that share a prefix are split


def build_batch_layout(
    rows: Sequence[Row],
    trajectory_ids: Sequence[int],
    num_ranks: int,
    mini_batch_size: int,
    max_tokens: int,
    padded: bool,
    seed: int = 0,
    shuffle: bool = False,
    group_ids: Sequence[int] | None = None,
    needs_full_sequence: bool = False,
    shared_prompts: SharedPrompts | None = None,
    min_sharing_ratio: float = MIN_SHARING_RATIO,
    num_mini_batches: int | None = None,
) -> BatchLayout:
    """Assign the token sequences of one training iteration to mini-batches, ranks and micro-batches.

    Args:
        trajectory_ids: trajectory of each of the B rows, 0 .. N-1; rows of one trajectory share a mini-batch.
        mini_batch_size: trajectories per optimizer step, over all ranks; not used if num_mini_batches is given.
        max_tokens: maximum tokens of one micro-batch on one rank. Shared prefixes count once.
        padded: rows are padded to the longest row of the micro-batch, and padding counts.
        shuffle: shuffle trajectories (or groups), with `seed`, before they are split into mini-batches.
        group_ids: [N] group of each trajectory, 0 .. G-1, if mini-batches must not split groups.
        needs_full_sequence: rows of one trajectory share a micro-batch, even if they exceed max_tokens.
        shared_prompts: shared prefixes of the B rows, which are computed once. Rows are not padded then.
        min_sharing_ratio: prompts are shared only if row tokens / computed tokens is at least this ratio.
    """
    trajectory_rows, lengths = _list_group_members(trajectory_ids), [row.packed_length for row in rows]
    groups = [[index] for index in range(len(trajectory_rows))] if group_ids is None else _list_group_members(group_ids)
    num_steps = min(num_mini_batches or -(-len(trajectory_rows) // mini_batch_size), len(groups))
    step_groups = split_mini_batches(len(groups), num_steps, seed, shuffle)
    step_trajectories = [[trajectory for group in step for trajectory in groups[group]] for step in step_groups]
    step_rows = [[trajectory_rows[trajectory] for trajectory in step] for step in step_trajectories]
    if not needs_full_sequence:
        step_rows = [[[row] for bundle in step for row in bundle] for step in step_rows]
    tokens = _TokenCounts(lengths, shared_prompts)
    steps = [_distribute_step_rows(step, tokens, num_ranks, max_tokens) for step in step_rows]
    if shared_prompts is not None and sum(lengths) < min_sharing_ratio * sum(sum(costs) for _, costs, _ in steps):
        shared_prompts, tokens = None, _TokenCounts(lengths, None)
        steps = [_distribute_step_rows(step, tokens, num_ranks, max_tokens) for step in step_rows]
    orders: list[list[int]] = [[] for _ in range(num_ranks)]
    mini_batches: list[list[MiniBatch]] = [[] for _ in range(num_ranks)]
    for bundles, _, shares in steps:
        rank_bundles = [[bundles[index] for index in share] for share in shares]
        part_tokens = [[tokens.count_by_part(bundle) for bundle in own_bundles] for own_bundles in rank_bundles]
        micros = split_bundles_into_micro_batches_by_rank(part_tokens, max_tokens, padded and shared_prompts is None)
        for rank, (own_bundles, rank_micros) in enumerate(zip(rank_bundles, micros, strict=True)):
            micro_rows = [[row for index in micro for row in own_bundles[index]] for micro in rank_micros]
            offsets = [*accumulate(map(len, micro_rows), initial=len(orders[rank]))]
            mini_batches[rank].append(MiniBatch([list(range(start, end)) for start, end in pairwise(offsets)]))
            orders[rank] += chain.from_iterable(micro_rows)
    prompts = [None if shared_prompts is None else shared_prompts.select(order) for order in orders]
    rank_rows = [Rows.from_rows([rows[i] for i in order], part) for order, part in zip(orders, prompts, strict=True)]
    return BatchLayout(
        rank_batches=[RankBatch(*pair) for pair in zip(rank_rows, mini_batches, strict=True)],
        row_order=[np.array(order, dtype=np.int64) for order in orders],
        mini_batch_rows=[[row for index in step for row in trajectory_rows[index]] for step in step_trajectories],
    )


def filter_mini_batches(batch: BatchLayout, keep: np.ndarray, max_tokens: int, padded: bool) -> list[list[MiniBatch]]:
    """Remove the rows that `keep`, bool [B], excludes, and join small micro-batches. Returns the mini-batches of each
    rank. All ranks have the same number of micro-batches in a mini-batch, even if all of its rows are removed."""
    if keep.all():
        return [rank.mini_batches for rank in batch.rank_batches]
    ranks = []
    for rank, order in zip(batch.rank_batches, batch.row_order, strict=True):
        rank_keep, steps = keep[order], rank.mini_batches
        ranks.append([_filter_micro_batches(rank.rows, step, rank_keep, max_tokens, padded) for step in steps])
    counts = [max(1, *map(len, micros)) for micros in zip(*ranks, strict=True)]
    return [
        [MiniBatch(micros + [[]] * (count - len(micros))) for micros, count in zip(rank, counts, strict=True)]
        for rank in ranks
    ]


def _filter_micro_batches(
    rows: Rows, mini_batch: MiniBatch, keep: np.ndarray, max_tokens: int, padded: bool
) -> list[list[int]]:
    """Return the micro-batches of one mini-batch without the rows that `keep` excludes. Joins small micro-batches."""
    micros: list[list[int]] = []

    def fits(micro: list[int]) -> bool:
        variants = (rows, rows.rows_with_longer_prompts)
        return max(variant.count_computed_tokens(micro, padded) for variant in variants) <= max_tokens

    kept_rows = [[index for index in micro if keep[index]] for micro in mini_batch.micro_batches]
    for kept in filter(None, kept_rows):
        if micros and fits(micros[-1] + kept):
            micros[-1] += kept
        else:
            micros.append(kept)
    return micros


class _TokenCounts:
    """Numbers of tokens that the rows of a batch compute, with or without shared prefixes."""

    def __init__(self, lengths: list[int], shared_prompts: SharedPrompts | None):
        self.lengths = lengths
        self.prefix_ids: list[int] = [] if shared_prompts is None else shared_prompts.prefix_ids.tolist()
        self.prefix_lengths: list[int] = [] if shared_prompts is None else shared_prompts.lengths.tolist()

    def count_by_part(self, rows: list[int]) -> list[int]:
        """Count the tokens of each row; with shared prefixes, of each prefix, then of the rest of each row."""
        lengths, prefix_lengths = self.lengths, self.prefix_lengths
        if not self.prefix_ids:
            return [lengths[row] for row in rows]
        prefixes = {self.prefix_ids[row]: prefix_lengths[row] for row in rows}
        return [*prefixes.values(), *[lengths[row] - prefix_lengths[row] for row in rows]]


def _distribute_step_rows(
    step_rows: list[list[int]], tokens: _TokenCounts, num_ranks: int, max_tokens: int
) -> tuple[list[list[int]], list[int], list[list[int]]]:
    """Distribute the rows of one optimizer step to ranks. Returns bundles of rows, the tokens that each bundle
    computes, and bundle indices for each rank.

    A bundle stays in one micro-batch. It is a list in `step_rows` or, if all lists have one row, rows with a common
    prefix, which are split into several bundles if they exceed max_tokens or the ranks' loads would be unbalanced.
    """
    if not tokens.prefix_ids or any(len(rows) > 1 for rows in step_rows):
        costs = [sum(tokens.count_by_part(rows)) for rows in step_rows]
        return step_rows, costs, balance_ranks(costs, num_ranks)
    ids, lengths, limit = tokens.prefix_ids, tokens.lengths, max_tokens
    rows = sorted((row for (row,) in step_rows), key=lambda row: (ids[row], -lengths[row]))
    while True:
        starts, costs = _split_by_prefix(rows, lengths, ids, tokens.prefix_lengths, limit)
        max_total_load, has_single_rows = MAX_IMBALANCE * sum(costs), len(costs) == len(rows)
        # no distribution is balanced if one bundle alone exceeds the maximum load of a rank
        if max(costs, default=0) * num_ranks <= max_total_load or has_single_rows:
            shares = balance_ranks(costs, num_ranks)
            largest_load = max(sum(costs[i] for i in share) for share in shares)
            if largest_load * num_ranks <= max_total_load or has_single_rows:
                return [rows[start:end] for start, end in pairwise([*starts, len(rows)])], costs, shares
        limit //= 2


def _split_by_prefix(
    rows: list[int], lengths: list[int], prefix_ids: list[int], prefix_lengths: list[int], max_tokens: int
) -> tuple[list[int], list[int]]:
    """Split rows, sorted by prefix, into bundles of one prefix and at most max_tokens tokens; a prefix counts once.
    Returns the position of each bundle's first row, and its tokens."""
    starts: list[int] = []
    costs: list[int] = []
    prefix_id, cost = -1, 0
    for position, row in enumerate(rows):
        with_row = cost + lengths[row] - prefix_lengths[row]
        if prefix_ids[row] == prefix_id and with_row <= max_tokens:
            cost = costs[-1] = with_row
        else:
            prefix_id, cost = prefix_ids[row], lengths[row]
            starts.append(position)
            costs.append(cost)
    return starts, costs


def _list_group_members(group_ids: Sequence[int]) -> list[list[int]]:
    """Return the indices of the members of each group: `[0, 1, 0]` -> `[[0, 2], [1]]`."""
    members: list[list[int]] = [[] for _ in range(max(group_ids, default=-1) + 1)]
    for index, group in enumerate(group_ids):
        members[group].append(index)
    return members


def split_mini_batches(num_items: int, num_mini_batches: int, seed: int, shuffle: bool) -> list[list[int]]:
    """Split the items 0 .. num_items-1 into mini-batches. Their sizes differ by at most one."""
    order = np.arange(num_items)
    if shuffle:
        np.random.default_rng(derive_seed(seed, "split_mini_batches")).shuffle(order)
    return [part.tolist() for part in np.array_split(order, num_mini_batches)] if num_mini_batches else []


def balance_ranks(lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Distribute bundles of the given lengths to ranks, longest first, each to the rank with the fewest tokens. Returns
    the bundle indices of each rank."""
    loads = [(0, rank) for rank in range(num_ranks)]
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    for index in _sort_indices_longest_first(lengths):
        load, rank = loads[0]
        shares[rank].append(index)
        heapq.heapreplace(loads, (load + lengths[index], rank))
    return shares


def split_micro_batches(bundle_lengths: Sequence[Sequence[int]], max_tokens: int, padded: bool) -> list[list[int]]:
    """Split the row bundles of one rank, given by the lengths of their rows, into micro-batches of at most max_tokens
    tokens, longest first. A bundle of more tokens is a micro-batch by itself. Returns bundle indices."""
    batches: list[list[int]] = []
    num_rows = tokens = longest = 0
    sizes = [max(lengths) if padded else sum(lengths) for lengths in bundle_lengths]
    for index in _sort_indices_longest_first(sizes):
        count = len(bundle_lengths[index])
        cost = (num_rows + count) * longest if padded else tokens + sizes[index]
        if not batches or cost > max_tokens:
            batches.append([])
            num_rows, tokens, longest = 0, 0, sizes[index]
        batches[-1].append(index)
        num_rows, tokens = num_rows + count, tokens + sizes[index]
    return batches


def split_bundles_into_micro_batches_by_rank(
    row_lengths_by_rank_and_bundle: Sequence[Sequence[Sequence[int]]], max_tokens: int, padded: bool
) -> list[list[list[int]]]:
    """Split the row bundles of each rank into micro-batches, the same number (at least one) on every rank."""
    ranks = [split_micro_batches(lengths, max_tokens, padded) for lengths in row_lengths_by_rank_and_bundle]
    count = max([1, *map(len, ranks)])
    return [_split_largest_micro_batches(batches, count) for batches in ranks]


def _split_largest_micro_batches(batches: list[list[int]], count: int) -> list[list[int]]:
    """Halve the micro-batches with the most bundles until there are `count`; if none can be halved, add empty ones."""
    batches = list(batches)
    while len(batches) < count:
        fullest = max(range(len(batches)), key=lambda i: len(batches[i]), default=None)
        if fullest is None or len(batches[fullest]) < 2:
            return batches + [[] for _ in range(count - len(batches))]
        batch = batches[fullest]
        batches[fullest : fullest + 1] = [batch[: len(batch) // 2], batch[len(batch) // 2 :]]
    return batches


def _sort_indices_longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)


@dataclass(frozen=True)
class PreferenceBatch(RankBatch):
    """Answers that one rank trains on in one optimizer step. Of a pair, the chosen answer comes first."""

    is_good: np.ndarray  # bool [R]: the answer is chosen, or labelled desirable
    margins: np.ndarray  # float64 [R], margin of the pair (bradley_terry), equal for both rows
    sources: np.ndarray  # int64 [R], indices into source_names
    source_names: list[str]  # data sources of all ranks
    ref_logps: np.ndarray | None  # float64 [R] reference log-probs, if precomputed
    unrelated_answers: RankBatch  # for KTO's KL estimate: prompts of single answers with answers to other prompts
    unrelated_ref_logps: np.ndarray | None  # float64 [unrelated rows] reference log-probs, if precomputed


def distribute_preference_examples(
    examples: Sequence[PreferenceExample], num_ranks: int, max_tokens: int, padded: bool, uses_shared_prompts: bool
) -> list[PreferenceBatch]:
    """Distribute the answers of one optimizer step to the ranks. Returns one batch per rank."""
    rows = [row for example in examples for row in example.rows]
    example_ids = [index for index, example in enumerate(examples) for _ in example.rows]
    layout = _distribute_rows(rows, example_ids, num_ranks, max_tokens, padded, uses_shared_prompts)
    is_good = np.array([good for example in examples for good in example.is_good])
    margins = np.array([examples[index].margin for index in example_ids])
    names = sorted({example.data_source for example in examples})
    sources = np.array([names.index(examples[index].data_source) for index in example_ids])
    has_ref_logps = all(example.ref_logps is not None for example in examples)
    ref_logps = np.array([logp for example in examples for logp in (example.ref_logps or [])[: len(example.rows)]])
    unrelated_rows = [example.unrelated_answer for example in examples if example.unrelated_answer is not None]
    assert len(unrelated_rows) in (0, len(examples)), "single answers and pairs cannot be mixed"
    unrelated = _distribute_rows(unrelated_rows, range(len(unrelated_rows)), num_ranks, max_tokens, padded)
    unrelated_ref_logps = np.array([example.ref_logps[-1] for example in examples if example.ref_logps is not None])
    return [
        PreferenceBatch(
            rows=rank.rows,
            mini_batches=rank.mini_batches,
            is_good=is_good[order],
            margins=margins[order],
            sources=sources[order],
            source_names=names,
            ref_logps=ref_logps[order] if has_ref_logps else None,
            unrelated_answers=unrelated_rank,
            unrelated_ref_logps=unrelated_ref_logps[unrelated_order] if has_ref_logps else None,
        )
        for rank, order, unrelated_rank, unrelated_order in zip(
            layout.rank_batches, layout.row_order, unrelated.rank_batches, unrelated.row_order, strict=True
        )
    ]


def distribute_rows_for_reference(
    examples: Sequence[PreferenceExample], num_ranks: int, max_tokens: int, padded: bool, uses_shared_prompts: bool
) -> BatchLayout:
    """Distribute the answers whose reference log-probs are needed to the ranks, as one mini-batch."""
    rows = [row for example in examples for row in example.rows_for_reference]
    example_ids = [index for index, example in enumerate(examples) for _ in example.rows_for_reference]
    return _distribute_rows(rows, example_ids, num_ranks, max_tokens, padded, uses_shared_prompts)


def collect_row_values(batch: BatchLayout, rank_values: Sequence[np.ndarray]) -> np.ndarray:
    """Merge the arrays of the ranks, with one value per row of the rank, into one array in the batch's row order."""
    values = np.empty(batch.num_rows)
    for order, own_values in zip(batch.row_order, rank_values, strict=True):
        values[order] = own_values
    return values


def _distribute_rows(
    rows: Sequence[Row],
    example_ids: Sequence[int],
    num_ranks: int,
    max_tokens: int,
    padded: bool,
    uses_shared_prompts: bool = False,
) -> BatchLayout:
    """Distribute a mini-batch to ranks and micro-batches. example_ids: example of each row; its rows stay together."""
    return build_batch_layout(
        rows,
        example_ids,
        num_ranks,
        mini_batch_size=max(1, len(rows)),
        max_tokens=max_tokens,
        padded=padded,
        needs_full_sequence=True,
        shared_prompts=find_shared_prompts(rows, example_ids) if uses_shared_prompts else None,
    )
