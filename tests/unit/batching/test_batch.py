import numpy as np
import pytest

from alphaapollo.batching.batch import Columns, Rows
from alphaapollo.types import LONGER_PROMPT, Row
from tests.matrices import join
from tests.unit.batching.rows import lay_out
from tests.unit.batching.rows import make_row as row

ROWS = [row([1, 2], [10, 11, 12]), row([3], [20]), row([4, 5, 6], [30, 31], [1, 0]), row([7], [40, 41, 42, 43])]


def test_rows_are_flat_and_response_aligned():
    rows = Rows.from_rows(ROWS[:3])
    assert rows.token_ids.tolist() == [1, 2, 10, 11, 12, 3, 20, 4, 5, 6, 30, 31]
    assert rows.lengths.tolist() == [5, 2, 5]
    assert rows.response_starts.tolist() == [2, 1, 3]
    assert rows.response_lengths.tolist() == [3, 1, 2]
    assert rows.action_mask.tolist() == [1, 1, 1, 1, 1, 0]
    assert rows.rollout_logprobs.tolist() == [-10, -11, -12, -20, -30, 0]
    assert rows.token_offsets.tolist() == [0, 5, 7, 12]
    assert rows.response_offsets.tolist() == [0, 3, 4, 6]
    assert len(rows) == 3


def test_dtypes_are_those_that_travel():
    rows = Rows.from_rows(ROWS)
    dtypes = [column.dtype for column in (rows.token_ids, rows.action_mask, rows.rollout_logprobs)]
    assert dtypes == [np.int32, np.uint8, np.float32]


def test_selected_rows_have_the_requested_order():
    rows = Rows.from_rows(ROWS).select([2, 0])
    assert rows.token_ids.tolist() == [4, 5, 6, 30, 31, 1, 2, 10, 11, 12]
    assert rows.action_mask.tolist() == [1, 0, 1, 1, 1]
    assert rows.response_offsets.tolist() == [0, 2, 5]


def test_no_rows_are_rows_too():
    rows = Rows.from_rows([])
    assert len(rows) == 0
    assert rows.token_offsets.tolist() == [0]
    assert len(Rows.from_rows(ROWS).select([])) == 0


def test_a_row_without_prompt_is_refused():
    with pytest.raises(AssertionError, match="prompt token"):
        Rows.from_rows([row([], [1, 2])])


def test_columns_are_selected_with_their_rows():
    rows = Rows.from_rows(ROWS[:3])
    columns = Columns(advantages=np.arange(6.0), loss_weights=np.array([0.1, 0.2, 0.3]))
    selected = columns.select(rows, [2, 1])
    assert selected.advantages.tolist() == [4, 5, 3]
    assert selected.loss_weights.tolist() == [0.3, 0.2]
    assert selected.returns is None


def build(num_ranks):
    return lay_out(ROWS, None, num_ranks, 4, max_tokens=8, padded=False, shuffle=True)


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_joined_columns_are_in_row_order_for_any_layout(num_ranks):
    batch = build(num_ranks)
    logprobs = join(batch, [rank.rows.rollout_logprobs for rank in batch.rank_batches])
    assert logprobs.tolist() == [[-10, -11, -12, 0], [-20, 0, 0, 0], [-30, 0, 0, 0], [-40, -41, -42, -43]]
    mask = join(batch, [rank.rows.action_mask for rank in batch.rank_batches])
    assert mask.tolist() == [[1, 1, 1, 0], [1, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]]

    # splitting undoes joining
    values = np.arange(10, dtype=np.float32)
    columns = batch.split_by_rank(values)
    assert [len(column) for column in columns] == [rank.rows.response_lengths.sum() for rank in batch.rank_batches]
    assert batch.join_columns(columns).tolist() == values.tolist()


def test_row_values_go_to_the_ranks_of_their_rows():
    batch = build(2)
    parts = batch.split_row_values(np.array([0.0, 1.0, 2.0, 3.0]))
    first_tokens = {0.0: 1, 1.0: 3, 2.0: 4, 3.0: 7}
    for rank, values in zip(batch.rank_batches, parts, strict=True):
        starts = rank.rows.token_ids[rank.rows.token_offsets[:-1]]
        assert starts.tolist() == [first_tokens[value] for value in values]


def test_the_teacher_reads_its_prompt_before_the_same_response() -> None:
    """Rows (5, 6 | 7, 8) with the teacher prompt (1, 2, 3), and (9 | 4) without one."""
    rows = Rows.from_rows(
        [
            Row([5, 6, 7, 8], [0, 0, 1, 1], [0.0, 0.0, -0.5, -0.25], [3], columns={LONGER_PROMPT: [1, 2, 3]}),
            Row([9, 4], [0, 1], [0.0, -0.125], [1]),
        ]
    )
    longer = rows.rows_with_longer_prompts
    assert longer.token_ids.tolist() == [1, 2, 3, 7, 8, 9, 4]
    assert longer.lengths.tolist() == [5, 2] and longer.response_starts.tolist() == [3, 1]
    assert longer.action_mask.tolist() == rows.action_mask.tolist()
    assert rows.has_longer_prompt.tolist() == [True, False]
    assert rows.select([1]).rows_with_longer_prompts.token_ids.tolist() == [9, 4]
    assert rows.select([1, 0]).rows_with_longer_prompts.token_ids.tolist() == [9, 4, 1, 2, 3, 7, 8]
    plain = Rows.from_rows([Row([9, 4], [0, 1], [0.0, -0.125], [1])])
    assert plain.rows_with_longer_prompts is plain
