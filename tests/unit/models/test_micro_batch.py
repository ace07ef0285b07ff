from __future__ import annotations

import numpy as np
import pytest
import torch

from alphaapollo.batching.batch import Columns, Rows
from alphaapollo.models.micro_batch import MicroBatchBuilder

CPU = torch.device("cpu")


def two_rows(second: int = 4) -> Rows:
    """[5, 6 | 7, 8] and [9 | 2, 3, 4] (prompt | response), or the first tokens of the second row."""
    return Rows(
        token_ids=np.array([5, 6, 7, 8, 9, 2, 3, 4][: 4 + second]),
        lengths=np.array([4, second]),
        response_starts=np.array([2, 1]),
        action_mask=np.array([1, 1, 1, 0, 1][: 1 + second], dtype=np.uint8),
        rollout_logprobs=np.zeros(1 + second, dtype=np.float32),
    )


def test_layouts_by_hand():
    micro = MicroBatchBuilder(True, CPU).build(two_rows(3), [0, 1])
    assert micro.token_ids.tolist() == [[5, 6, 7, 8], [9, 2, 3, 0]]
    assert micro.position_ids.tolist() == [[0, 1, 2, 3]]
    assert micro.predicting_tokens.shard_positions.tolist() == [1, 2, 4, 5]  # the state at token t predicts token t + 1
    assert micro.targets.tolist() == [7, 8, 2, 3]
    assert micro.packing is None
    micro = MicroBatchBuilder(False, CPU).build(two_rows(), [1, 0])
    assert micro.token_ids.tolist() == [[9, 2, 3, 4, 5, 6, 7, 8]]
    assert micro.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3]]
    assert micro.packing is not None
    assert micro.packing.cu_seqlens.tolist() == [0, 4, 8]
    assert micro.predicting_tokens.shard_positions.tolist() == [0, 1, 2, 5, 6]
    assert micro.targets.tolist() == [2, 3, 4, 7, 8]


def test_matrix_is_response_aligned_and_differentiable():
    micro = MicroBatchBuilder(True, CPU).build(two_rows(), [0, 1])
    flat = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], requires_grad=True)
    matrix = micro.to_matrix(flat)
    assert matrix.tolist() == [[1.0, 2.0, 0.0], [3.0, 4.0, 5.0]]
    (matrix * torch.tensor([[1.0, 2.0, 9.0], [3.0, 4.0, 5.0]])).sum().backward()
    assert flat.grad is not None
    assert flat.grad.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_without_rows_there_is_a_dummy_of_weight_zero():
    for padded in (True, False):
        given = Columns(advantages=np.ones(5), loss_weights=np.ones(2), trajectory_ids=np.array([0, 0]))
        micro = MicroBatchBuilder(padded, CPU).build(two_rows(), [], given)
        assert micro.is_dummy
        assert micro.token_ids.shape == (1, 2)
        assert micro.to_matrix(torch.ones(1)).shape == (1, 1)
        assert micro.to_matrix(micro.mask).tolist() == [[0.0]]
        assert micro.columns.advantages.tolist() == micro.columns.loss_weights.tolist() == [0.0]
        assert micro.columns.trajectory_ids is None and micro.columns.values is None
        assert micro.drop_dummy_row(torch.ones(1)).shape == (0,)


@pytest.mark.parametrize(("dtype", "expected"), [(np.float32, torch.float32), (np.float64, torch.float64)])
def test_columns_keep_their_values(dtype: type, expected: torch.dtype):
    column = np.array([1, 2, 3, 4, 5], dtype=dtype)
    column.flags.writeable = False  # as arrays from Ray are
    given = Columns(returns=column, sequence_weights=np.array([0.5, 2.0]), trajectory_ids=np.array([7, 7]))
    micro = MicroBatchBuilder(True, CPU).build(two_rows(), [1, 0], given)
    assert micro.to_matrix(micro.columns.returns).tolist() == [[3.0, 4.0, 5.0], [1.0, 2.0, 0.0]]
    assert micro.columns.sequence_weights.tolist() == [2.0, 0.5]
    assert micro.columns.returns.dtype == expected
    assert micro.columns.trajectory_ids.tolist() == [7, 7]
    assert micro.drop_dummy_row(torch.arange(5.0)).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert micro.last_tokens.shard_positions.tolist() == [3, 7]


def test_rows_of_different_trajectories_need_no_ids():
    given = Columns(trajectory_ids=np.array([7, 7, 8])[[0, 2]])
    assert MicroBatchBuilder(True, CPU).build(two_rows(), [0, 1], given).columns.trajectory_ids is None
