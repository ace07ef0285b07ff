from __future__ import annotations

import numpy as np
import torch

from alphaapollo.data.batch import Rows
from alphaapollo.models.micro_batch import build_micro_batch

CPU = torch.device("cpu")


def two_rows() -> Rows:
    """[5, 6 | 7, 8] and [9 | 2, 3, 4] (prompt | response)."""
    return Rows(
        token_ids=np.array([5, 6, 7, 8, 9, 2, 3, 4]),
        lengths=np.array([4, 4]),
        response_starts=np.array([2, 1]),
        action_mask=np.array([1, 1, 1, 0, 1], dtype=np.uint8),
        rollout_logprobs=np.zeros(5, dtype=np.float32),
    )


def test_padded_layout_by_hand():
    rows = two_rows()
    short = Rows(
        token_ids=np.array([5, 6, 7, 8, 9, 2, 3]),
        lengths=np.array([4, 3]),
        response_starts=np.array([2, 1]),
        action_mask=rows.action_mask[:4],
        rollout_logprobs=rows.rollout_logprobs[:4],
    )
    micro = build_micro_batch(short, [0, 1], True, CPU)
    assert micro.token_ids.tolist() == [[5, 6, 7, 8], [9, 2, 3, 0]]
    assert micro.position_ids.tolist() == [[0, 1, 2, 3]]
    assert micro.states.tolist() == [1, 2, 4, 5]  # the state at token t predicts token t + 1
    assert micro.targets.tolist() == [7, 8, 2, 3]
    assert micro.packing is None


def test_packed_layout_by_hand():
    micro = build_micro_batch(two_rows(), [1, 0], False, CPU)
    assert micro.token_ids.tolist() == [[9, 2, 3, 4, 5, 6, 7, 8]]
    assert micro.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3]]
    assert micro.packing is not None
    assert micro.packing.cu_seqlens.tolist() == [0, 4, 8]
    assert micro.states.tolist() == [0, 1, 2, 5, 6]
    assert micro.targets.tolist() == [2, 3, 4, 7, 8]


def test_matrix_is_response_aligned_and_differentiable():
    micro = build_micro_batch(two_rows(), [0, 1], True, CPU)
    flat = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], requires_grad=True)
    matrix = micro.to_matrix(flat)
    assert matrix.tolist() == [[1.0, 2.0, 0.0], [3.0, 4.0, 5.0]]
    (matrix * torch.tensor([[1.0, 2.0, 9.0], [3.0, 4.0, 5.0]])).sum().backward()
    assert flat.grad is not None
    assert flat.grad.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_no_rows_make_a_dummy_that_weighs_nothing():
    for padded in (True, False):
        micro = build_micro_batch(two_rows(), [], padded, CPU)
        assert micro.is_dummy
        assert micro.token_ids.shape == (1, 2)
        assert micro.to_matrix(torch.ones(1)).shape == (1, 1)
        assert micro.matrix(micro.rows.action_mask).tolist() == [[0.0]]
        assert micro.tensor(np.zeros(0)).tolist() == [0.0]  # a column of no rows
        assert micro.values(torch.ones(1)).shape == (0,)


def test_columns_travel_as_float32_copies():
    micro = build_micro_batch(two_rows(), [0, 1], True, CPU)
    column = np.array([1, 2, 3, 4, 5], dtype=np.float64)
    column.flags.writeable = False  # as arrays from Ray are
    assert micro.matrix(column).tolist() == [[1.0, 2.0, 0.0], [3.0, 4.0, 5.0]]
    assert micro.values(torch.arange(5.0)).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
