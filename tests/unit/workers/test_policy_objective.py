"""Loss and metrics of a micro-batch of two rows, worked out by hand. Tokens outside the mask have no effect."""

from __future__ import annotations

import math

import pytest
import torch

from alphaapollo.algorithms.policy_losses import get_policy_loss
from alphaapollo.config.schema import Actor, RolloutCorrection
from alphaapollo.workers.policy_objective import ObjectiveInputs, compute_policy_objective, normalize_metrics

MASK = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
OLD = torch.tensor([[-1.0, -2.0, -50.0], [-1.5, -60.0, -70.0]])


def make_inputs(**fields: torch.Tensor) -> ObjectiveInputs:
    """Inputs whose ratio is 1, and whose engine sampled with the probabilities 2 / 3 (row 0, in all) and 2 (row 1)."""
    engine = OLD - torch.tensor([[math.log(1.5), 0.0, 9.0], [-math.log(2.0), 9.0, 9.0]])
    given = {"logp": OLD.clone(), "advantages": torch.tensor([[2.0, 2.0, 0.0], [-1.0, 0.0, 0.0]]), **fields}
    weights = {"loss_weights": torch.tensor([0.25, 0.5]), "sequence_weights": torch.tensor([0.5, 0.75])}
    return ObjectiveInputs(
        old_logp=OLD, rollout_logp=engine, mask=MASK, divergence_weights=weights["loss_weights"], **weights, **given
    )


@pytest.mark.parametrize(("loss", "expected"), [("ppo", -0.25 * 4 * 1.5 + 0.5 * 0.5), ("gspo", -0.5 * 3 + 0.75 * 0.5)])
def test_a_trajectory_has_one_weight_for_all_of_its_tokens(loss: str, expected: float) -> None:
    correction = RolloutCorrection(method="tis", level="sequence")
    value, metrics = compute_policy_objective(make_inputs(), Actor(), get_policy_loss(loss), correction)
    assert value.item() == metrics["pg_loss"].item() == pytest.approx(expected)
    assert metrics["correction_weight"].item() == pytest.approx(1.5 + 1.5 + 0.5) and metrics["tokens"] == 3


def test_metrics_count_sampled_tokens() -> None:
    actor = Actor(use_kl_loss=True, kl_loss_type="kl", kl_loss_coef=0.1)
    correction = RolloutCorrection(off_policy_mask_threshold=0.5)
    inputs = make_inputs(ref_logp=OLD - torch.tensor([[0.5, 0.25, 9.0], [1.0, 9.0, 9.0]]))
    value, metrics = compute_policy_objective(inputs, actor, get_policy_loss("ppo"), correction)
    assert metrics["ref_kl"].item() == pytest.approx(0.5 + 0.25 + 1.0)
    assert metrics["off_policy_masked"] == 1  # row 1: ln 2 > .5, with a negative advantage
    assert metrics["pg_loss"].item() == pytest.approx(-0.25 * 4)
    assert value.item() == pytest.approx(-0.25 * 4 + 0.1 * (0.25 * 0.75 + 0.5 * 1.0))


def test_means_have_their_own_denominators() -> None:
    sums = {"loss": 6.0, "ratio_max": 3.0, "ref_kl": 5.0, "tokens": 10.0, "rows": 4.0, "row_clipped": 2.0}
    found = normalize_metrics(sums | {"distill/divergence": 3.0, "distilled_tokens": 6.0}, num_steps=2)
    assert found == {"loss": 3.0, "ratio_max": 3.0, "ref_kl": 0.5, "clipped": 0.5, "distill/divergence": 0.5}
    assert normalize_metrics({"loss": 1.0, "pg_loss": 2.0, "tokens": 0.0}, num_steps=2) == {"loss": 0.5, "pg_loss": 1.0}
