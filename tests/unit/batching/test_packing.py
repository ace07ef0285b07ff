from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from alphaapollo.batching.packing import (
    balance_ranks,
    split_bundles_into_micro_batches_by_rank,
    split_micro_batches,
    split_mini_batches,
)
from tests.unit.batching.rows import lay_out, make_row

LENGTHS = st.lists(st.integers(1, 50), max_size=60)


def parts(lengths: list[int]) -> list[list[int]]:
    """Every row is a separate trajectory."""
    return [[length] for length in lengths]


def test_mini_batches_without_shuffle_are_consecutive_and_of_near_equal_sizes():
    assert split_mini_batches(4, 2, seed=0, shuffle=False) == [[0, 1], [2, 3]]
    assert [len(part) for part in split_mini_batches(10, 3, seed=0, shuffle=False)] == [4, 3, 3]
    assert split_mini_batches(0, 0, seed=0, shuffle=True) == []


def test_balance_gives_the_longest_to_the_emptiest():
    # 9 -> a; 7 -> b; 6 -> b (13); 5 -> a (14); 1 -> b (14)
    assert balance_ranks([5, 9, 1, 7, 6], 2) == [[1, 0], [3, 4, 2]]


@given(LENGTHS, st.integers(1, 5))
def test_ranks_differ_by_one_row_at_most(lengths, num_ranks):
    shares = balance_ranks(lengths, num_ranks)
    assert sorted(chain(*shares)) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in share) for share in shares]
    assert max(loads) - min(loads) <= max(lengths, default=0)


def test_micro_batches_by_sum_and_padded():
    lengths = [3, 8, 5, 4]
    assert split_micro_batches(parts(lengths), 12, padded=False) == [[1], [2, 3, 0]]  # 8; 5 + 4 + 3 = 12
    assert split_micro_batches(parts(lengths), 12, padded=True) == [[1], [2, 3], [0]]  # 8; 2 x 5; 3


def test_row_over_the_budget_is_a_separate_micro_batch():
    assert split_micro_batches(parts([20, 3, 30]), 10, padded=True) == [[2], [0], [1]]


@given(LENGTHS, st.integers(1, 100), st.booleans())
def test_micro_batches_hold_every_row_once_within_the_budget(lengths, max_tokens, padded):
    batches = split_micro_batches(parts(lengths), max_tokens, padded)
    assert sorted(chain(*batches)) == list(range(len(lengths)))
    for batch in batches:
        rows = [lengths[i] for i in batch]
        assert len(rows) == 1 or (len(rows) * max(rows) if padded else sum(rows)) <= max_tokens


def test_ranks_get_equally_many_micro_batches():
    # rank 0 needs three; rank 1 halves its fullest twice; rank 2 has nothing
    ranks = [parts([9, 9, 9]), parts([2, 2, 2, 2]), []]
    expected = [[[0], [1], [2]], [[0], [1], [2, 3]], [[], [], []]]
    assert split_bundles_into_micro_batches_by_rank(ranks, 10, padded=False) == expected
    assert split_bundles_into_micro_batches_by_rank([[], []], 10, padded=False) == [[[]], [[]]]


@given(st.lists(LENGTHS, min_size=1, max_size=4), st.booleans())
def test_equal_micro_batches_stay_within_the_budget(ranks, padded):
    out = split_bundles_into_micro_batches_by_rank([parts(lengths) for lengths in ranks], 60, padded)
    assert len({len(batches) for batches in out}) == 1
    for lengths, batches in zip(ranks, out, strict=True):
        assert sorted(chain(*batches)) == list(range(len(lengths)))
        for rows in [[lengths[i] for i in batch] for batch in batches if batch]:
            assert (len(rows) * max(rows) if padded else sum(rows)) <= 60


def rows_of(lengths):
    return [make_row([0], range(1, n + 1)) for n in lengths]


@given(LENGTHS, st.integers(1, 4), st.booleans())
def test_every_row_is_in_one_batch(lengths, num_ranks, padded):
    rows = rows_of(lengths)
    ids = [i // 2 for i in range(len(rows))]  # two rows a trajectory
    batch = lay_out(rows, ids, num_ranks, 3, padded=padded, seed=1, shuffle=True)
    assert sorted(i for order in batch.row_order for i in order) == list(range(len(rows)))
    for step, members in enumerate(batch.mini_batch_rows):
        steps = [rank.mini_batches[step].micro_batches for rank in batch.rank_batches]
        assert len({len(micros) for micros in steps}) == 1
        pairs = zip(batch.row_order, steps, strict=True)
        walked = [int(order[position]) for order, micros in pairs for micro in micros for position in micro]
        assert sorted(walked) == sorted(members)
        assert len({ids[row] for row in members}) <= 3
    for rank in batch.rank_batches:
        positions = [p for step in rank.mini_batches for micro in step.micro_batches for p in micro]
        assert positions == list(range(len(rank.rows)))


def test_rows_of_one_trajectory_share_a_mini_batch():
    ids = [0, 1, 0, 1, 2, 2]
    batch = lay_out(rows_of([3] * 6), ids, 2, 1, seed=5, shuffle=True)
    assert sorted(map(sorted, batch.mini_batch_rows)) == [[0, 2], [1, 3], [4, 5]]


def test_groups_can_share_a_mini_batch():
    groups = [0, 0, 1, 1, 2, 2, 3]  # of trajectories 0 .. 6, one row each
    batch = lay_out(rows_of([3] * 7), mini_batch_size=4, seed=5, shuffle=True, group_ids=groups)
    assert [len(rows) for rows in batch.mini_batch_rows] in ([4, 3], [3, 4])
    assert not {groups[row] for row in batch.mini_batch_rows[0]} & {groups[row] for row in batch.mini_batch_rows[1]}
    one_each = lay_out(rows_of([3] * 7), mini_batch_size=1, group_ids=groups)
    assert one_each.mini_batch_rows == [[0, 1], [2, 3], [4, 5], [6]]


def test_rows_of_one_trajectory_can_share_a_micro_batch():
    ids = [0, 1, 0, 1, 2, 0]
    lengths = [9, 3, 2, 2, 4, 9]  # and a prompt token each; trajectory 0 exceeds the budget, 1 and 2 fit together
    for padded in (True, False):
        batch = lay_out(rows_of(lengths), ids, 1, 8, 15, padded, needs_full_sequence=True)
        (step,) = batch.rank_batches[0].mini_batches
        walked = [[int(batch.row_order[0][position]) for position in micro] for micro in step.micro_batches]
        assert walked == ([[0, 2, 5], [4, 1, 3]] if padded else [[0, 2, 5], [1, 3, 4]])


def test_the_layout_is_a_function_of_its_arguments():
    def build(seed):
        return lay_out(rows_of(range(1, 30)), None, 3, 8, seed=seed, shuffle=True)

    assert build(1).mini_batch_rows == build(1).mini_batch_rows
    assert [o.tolist() for o in build(1).row_order] == [o.tolist() for o in build(1).row_order]
    assert build(1).mini_batch_rows != build(2).mini_batch_rows
