import torch

from alphaapollo.algorithms.statistics import JoinedTrajectories

MASK = torch.tensor([[1, 0, 1], [1, 1, 0], [0, 0, 0], [0, 1, 1]])
IDS = torch.tensor([7, 9, 4, 7])  # rows 0 and 3 are of one trajectory; 4 has no action token
VALUES = torch.tensor([[1.0, 99.0, 2.0], [5.0, 6.0, 99.0], [99.0] * 3, [99.0, 3.0, 4.0]])


def test_rows_of_a_trajectory_become_one_in_their_order():
    whole = JoinedTrajectories.from_mask(MASK, IDS)
    assert whole.mask.tolist() == [[0, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0]]
    assert whole.join(VALUES).tolist() == [[0, 0, 0, 0], [1, 2, 3, 4], [5, 6, 0, 0]]
    values = torch.tensor([0.75, 0.5, 0.25, 0.75])
    assert whole.rows_by_trajectory.take_value_per_group(values).tolist() == [0.25, 0.75, 0.5]
    # split is the inverse on action tokens, and zero elsewhere
    assert whole.split(whole.join(VALUES)).tolist() == [[1, 0, 2], [5, 6, 0], [0, 0, 0], [0, 3, 4]]


def test_gradients_pass_in_both_directions_and_masked_values_do_not_matter():
    values = torch.where(MASK.bool(), VALUES, torch.nan).requires_grad_()
    whole = JoinedTrajectories.from_mask(MASK, IDS)
    (whole.split(2 * whole.join(values)) * 3).sum().backward()
    assert (values.grad == 6 * MASK).all()


def test_no_action_token_at_all():
    whole = JoinedTrajectories.from_mask(torch.zeros(2, 3), torch.tensor([0, 0]))
    assert whole.mask.tolist() == [[0.0]]
    assert whole.split(whole.join(torch.ones(2, 3))).tolist() == [[0.0] * 3] * 2
