"""Shared prefixes of rows, by hand, and micro-batches that keep rows of a family together."""

from __future__ import annotations

from itertools import chain

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from alphaapollo.batching.packing import filter_mini_batches
from alphaapollo.batching.shared_prompts import find_shared_prompts
from alphaapollo.types import Row
from tests.unit.batching.rows import lay_out, make_row


def row(prompt: list[int], response: int = 2) -> Row:
    return make_row(prompt, range(100, 100 + response))


def test_samples_share_their_whole_prompt_and_groups_nothing():
    rows = [row([1, 2, 3]), row([1, 2, 3], 5), row([1, 2, 3]), row([9])]
    prefixes = find_shared_prompts(rows, [0, 0, 1, 1])
    assert prefixes.prefix_ids.tolist() == [0, 0, 2, 1]  # the third row has the same prompt, but is of another group
    assert prefixes.lengths.tolist() == [3, 3, 3, 1]
    lengths = np.array([len(one.token_ids) for one in rows])
    segments, before = prefixes.get_segment_and_prefix_lengths(lengths)
    assert segments.tolist() == [3, 1, 3, 2, 5, 2, 2]
    assert before.tolist() == [0, 0, 0, 3, 3, 3, 1]


def test_memory_context_rows_share_the_longest_prefix():
    """[1 2 3 4 5] twice and [1 2 3 4 6] share four tokens, which saves 8; one family of all would save 3."""
    rows = [row([1, 2, 3, 4, 5]), row([1, 7, 8]), row([1, 2, 3, 4, 6]), row([1, 2, 3, 4, 5])]
    prefixes = find_shared_prompts(rows, [0] * 4)
    assert prefixes.lengths.tolist() == [4, 3, 4, 4]
    assert prefixes.prefix_ids[0] == prefixes.prefix_ids[2] == prefixes.prefix_ids[3] != prefixes.prefix_ids[1]


def test_a_prefix_ends_where_the_shortest_prompt_does():
    prefixes = find_shared_prompts([row([1, 2]), row([1, 2, 100, 4])], [0, 0])
    assert prefixes.lengths.tolist() == [2, 2] and prefixes.prefix_ids.tolist() == [0, 0]


PROMPTS = st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=6), min_size=1, max_size=12)


@given(PROMPTS, st.data())
def test_families_share_their_answer_and_cannot_be_shortened(prompts: list[list[int]], data: st.DataObject):
    rows = [row(prompt) for prompt in prompts]
    prefixes = find_shared_prompts(rows, [0] * len(rows))
    saved = 0
    for family in set(prefixes.prefix_ids.tolist()):
        members = np.flatnonzero(prefixes.prefix_ids == family)
        (length,) = set(prefixes.lengths[members].tolist())
        assert len({tuple(prompts[i][:length]) for i in members}) == 1
        assert all(length <= len(prompts[i]) for i in members)
        saved += (len(members) - 1) * length
    # any one family of neighbours in sorted order
    ordered = sorted(prompts)
    start = data.draw(st.integers(0, len(rows) - 1))
    end = data.draw(st.integers(start + 1, len(rows)))
    common = 0
    for column in zip(*ordered[start:end], strict=False):
        if len(set(column)) > 1:
            break
        common += 1
    assert saved >= (end - start - 1) * common


def train_batch(rows, groups, max_tokens=10**6, **more):
    more = {"shared_prompts": find_shared_prompts(rows, groups), "min_sharing_ratio": 0.0} | more
    return lay_out(rows, max_tokens=max_tokens, **more)


def test_a_group_stays_in_one_micro_batch_and_its_prompt_counts_once():
    rows = [row([group] * 10, 3) for group in (1, 2, 3) for _ in range(4)]  # 22 tokens a group
    groups = [0] * 4 + [1] * 4 + [2] * 4
    batch = train_batch(rows, groups, max_tokens=45)
    (mini_batch,) = batch.rank_batches[0].mini_batches
    ids = batch.rank_batches[0].rows.shared_prompts.prefix_ids
    assert [sorted(ids[micro].tolist()) for micro in mini_batch.micro_batches] == [[0] * 4 + [1] * 4, [2] * 4]
    assert batch.count_computed_tokens(padded=True) == 66 and batch.num_tokens == 156


def test_a_group_over_the_budget_is_cut_and_its_parts_share():
    batch = train_batch([row([1] * 10, 3) for _ in range(4)], [0] * 4, max_tokens=16)
    assert [len(micro) for micro in batch.rank_batches[0].mini_batches[0].micro_batches] == [2, 2]
    assert batch.count_computed_tokens(padded=True) == 32


def test_groups_are_cut_until_the_ranks_have_equal_work():
    batch = train_batch([row([1] * 2, 30) for _ in range(8)], [0] * 8, num_ranks=4)
    assert [rank.count_computed_tokens(padded=False) for rank in batch.rank_batches] == [62] * 4


def test_whole_trajectories_stay_together_and_share_within_a_micro_batch():
    """Two trajectories of two rows each; the first rows share ten tokens, the second ones eight."""
    rows = [row([1] * 10, 2), row([2] * 8, 2), row([1] * 10, 2), row([2] * 8, 2)]
    batch = train_batch(rows, [0] * 4, max_tokens=100, owners=[0, 0, 1, 1], needs_full_sequence=True)
    assert len(batch.rank_batches[0].mini_batches[0].micro_batches) == 1
    assert batch.count_computed_tokens(padded=True) == 10 + 8 + 4 * 2


def test_prefixes_that_save_too_little_are_left_alone():
    rows = [row([1] * 10, 30), row([1] * 10, 30)]  # 80 tokens, 70 of them computed
    for min_sharing_ratio, shares in ((1.1, True), (1.2, False)):
        batch = train_batch(rows, [0, 0], max_tokens=100, min_sharing_ratio=min_sharing_ratio)
        assert (batch.rank_batches[0].rows.shared_prompts is not None) is shares
        assert batch.count_computed_tokens(padded=False) == (70 if shares else 80)


def test_mini_batches_that_cut_a_group_share_within_each_part():
    batch = train_batch([row([1] * 10, 2) for _ in range(4)], [0] * 4, mini_batch_size=2)
    assert [len(one.row_indices) for one in batch.rank_batches[0].mini_batches] == [2, 2]
    assert batch.count_computed_tokens(padded=False) == 28


LENGTHS = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 20)), min_size=1, max_size=40)


@given(LENGTHS, st.integers(1, 3), st.integers(5, 90), st.booleans(), st.data())
def test_kept_rows_are_computed_once_and_others_are_not(shapes, num_ranks, max_tokens, shares, data):
    rows, groups = [row([group + 1] * (group + 1), length) for group, length in shapes], [group for group, _ in shapes]
    more = {"num_ranks": num_ranks, "mini_batch_size": 7, "seed": 1, "shuffle": True}
    batch = train_batch(rows, groups, max_tokens, **more if shares else more | {"shared_prompts": None})
    keep = np.array(data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows))))
    steps = filter_mini_batches(batch, keep, max_tokens, padded=True)
    seen = []
    for rank, order, own in zip(batch.rank_batches, batch.row_order, steps, strict=True):
        assert len(own) == len(rank.mini_batches)
        for one, before in zip(own, rank.mini_batches, strict=True):
            assert set(one.row_indices) <= set(before.row_indices)
            seen += order[one.row_indices].tolist()
            for micro in one.micro_batches:
                stood = [set(micro) <= set(other) for other in before.micro_batches]
                assert any(stood) or rank.rows.count_computed_tokens(micro, padded=True) <= max_tokens
    assert sorted(seen) == np.flatnonzero(keep).tolist()
    for ranks in zip(*steps, strict=True):
        assert len({len(one.micro_batches) for one in ranks}) == 1 and ranks[0].micro_batches


def test_keeping_every_row_changes_nothing():
    batch = train_batch([row([1] * 10, 3) for _ in range(4)], [0] * 4, max_tokens=16)
    steps = filter_mini_batches(batch, np.ones(4, dtype=bool), 16, padded=True)
    assert steps == [rank.mini_batches for rank in batch.rank_batches]
    assert list(chain(*steps[0][0].micro_batches)) == [0, 1, 2, 3]
