import torch

from alphaapollo.algorithms.mismatch import off_policy_sequence_mask, rollout_correction_weights

# Ratios by token: row 0 has 0.5, 4 and an observation; row 1 has 2; row 2 is empty.
TRAIN = torch.tensor([[0.5, 4.0, 7.0], [2.0, 1.0, 1.0], [1.0, 1.0, 1.0]], dtype=torch.float64).log()
ROLLOUT = torch.zeros(3, 3, dtype=torch.float64)
MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])


def test_all_masked_batch():
    """The golden vectors have other values of the off-policy mask."""
    nothing = torch.zeros(3, 3)
    assert not rollout_correction_weights(TRAIN, ROLLOUT, nothing).any()
    kept = off_policy_sequence_mask(TRAIN.clone().requires_grad_(), ROLLOUT, -torch.ones(3, 3), nothing, 0.1)
    assert not kept.any() and not kept.requires_grad


def test_a_product_over_a_long_row_stays_finite():
    ones = torch.ones(1, 500)
    weights = rollout_correction_weights(ones, 0 * ones, ones, method="tis", level="sequence", high=None)
    assert weights.isfinite().all()
