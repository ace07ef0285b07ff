"""DeepSeek-V3.2's parts in the loss of a micro-batch: the off-policy mask and the unbiased KL."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from alphaapollo.algorithms.policy_losses import get_policy_loss
from alphaapollo.config.schema import Actor, RolloutCorrection
from alphaapollo.workers.policy_objective import ObjectiveInputs, compute_policy_objective

ENGINE = torch.full((3, 2), -1.0, dtype=torch.float64)
MASK = torch.tensor([[1.0, 1.0], [1.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
RATIOS = torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.95, 9.0]], dtype=torch.float64)  # to the engine
SIGNS = torch.tensor([[-1.0], [1.0], [-1.0]], dtype=torch.float64)


def objective(
    loss: str, threshold: float | None, old_logp: torch.Tensor = ENGINE, correction: Any = None, **actor: Any
):
    """Loss, gradient and metrics. The weight of each token and row is 1; the reference is the engine's policy. A loss
    that selects tokens has the first one of each row."""
    logp = (ENGINE + RATIOS.log()).requires_grad_()
    matrices = ObjectiveInputs(
        logp=logp,
        old_logp=old_logp,
        advantages=SIGNS.expand(3, 2) * MASK,
        mask=MASK,
        rollout_logp=ENGINE,
        ref_logp=ENGINE,
        selected_tokens=torch.tensor([[True, False]] * 3),
        loss_weights=torch.ones(3, dtype=torch.float64),
        sequence_weights=torch.ones(3, dtype=torch.float64),
        divergence_weights=torch.zeros(3, dtype=torch.float64),
    )
    settings = Actor(policy_loss={"loss_mode": loss}, **actor)
    correction = RolloutCorrection(off_policy_mask_threshold=threshold, **correction or {})
    total, metrics = compute_policy_objective(matrices, settings, get_policy_loss(loss), correction)
    total.backward()
    return total.item(), logp.grad.tolist(), {name: float(one.detach()) for name, one in metrics.items()}


def test_the_mask_drops_the_policy_loss_of_negative_trajectories_that_moved_away():
    """log(mu/pi) is 0.69 in the first two rows and 0.05 in the third one. PPO clips the first row's ratio at 0.8."""
    total, gradient, metrics = objective("ppo", 0.1)
    assert total == pytest.approx(0.0 - 2 * 0.5 + 0.95)
    assert gradient == [[0.0, 0.0], pytest.approx([-0.5, -0.5]), pytest.approx([0.95, 0.0])]
    assert (metrics["off_policy_masked"], metrics["tokens"]) == (2.0, 5.0)
    assert objective("ppo", None)[0] == pytest.approx(2 * 0.8 - 2 * 0.5 + 0.95)
    assert objective("ppo", 0.7)[2]["off_policy_masked"] == 0.0
    assert "off_policy_masked" not in objective("ppo", None)[2]


@pytest.mark.parametrize(
    ("threshold", "correction", "old_logp"),
    [(0.1, {}, ENGINE), (None, {"method": "mask", "high": 1.5}, ENGINE + 1.0)],  # drops the first row; drops all
)
@pytest.mark.parametrize(("loss", "slope"), [("ppo_kl", lambda r: r - 1), ("kl_cov", lambda r: (r > 1) * 2.0 - 1)])
def test_masks_keep_the_penalty(
    loss: str, slope: Any, threshold: float | None, correction: Any, old_logp: torch.Tensor
) -> None:
    """The first row's only gradient is that of the penalty, by hand r - 1 or the sign of log r."""
    _, gradient, _ = objective(loss, threshold, old_logp, correction)
    expected = slope(RATIOS[0] * (ENGINE - old_logp)[0].exp()) * torch.tensor([1.0, float(loss == "ppo_kl")])
    assert gradient[0] == pytest.approx(expected.tolist())
