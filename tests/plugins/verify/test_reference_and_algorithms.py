"""Estimators, losses, correction weights and aggregation with each of their options, and the reference."""

from __future__ import annotations

import math
from itertools import product
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch

from alphaapollo.algorithms.advantages import AdvantageInputs, estimator_names, get_estimator
from alphaapollo.algorithms.aggregation import row_weights
from alphaapollo.algorithms.mismatch import rollout_correction_weights
from alphaapollo.algorithms.policy_losses import PolicyLossInputs, get_policy_loss, policy_loss_names
from alphaapollo.config.schema import Actor, AggregationMode, Algorithm
from alphaapollo.plugins.verify.reference import advantages, losses
from tests.plugins.verify.reference_batches import ACTOR, CORRECTION, LOSS, make_config, make_samples, make_terms
from tests.unit.algorithms.batches import with_choice
from tests.unit.algorithms.test_declarations import ALGORITHMS, OTHER, group_batch


def compute_advantages(inputs: AdvantageInputs, algorithm: Algorithm) -> tuple[np.ndarray, np.ndarray]:
    """The reference's advantages and returns. Each token is a turn, except for estimators with turns."""
    inside, rows = inputs.mask.bool(), range(len(inputs.mask))
    rewards, flat_turns = inputs.token_rewards[inside].numpy(), inputs.turns.turn_of_token[inside].numpy()
    has_turns = "turns" in get_estimator(algorithm.adv_estimator).needs
    numbers = flat_turns if has_turns else np.arange(len(rewards))
    batch = advantages.Batch(make_samples(inputs.mask, inputs.group_ids.tolist()), [], {}, len(rewards))
    for row, sample in zip(rows, batch.samples, strict=True):
        own = np.unique(numbers[sample.tokens])
        sample.turns = [np.flatnonzero(numbers == turn) for turn in own]
        sample.rewards = np.array([rewards[turn].sum() for turn in sample.turns])
        sample.states = [inputs.turns.anchor_ids[turn].item() for turn in own] if has_turns else []
        named = {name: values[row].item() for name, values in inputs.components.items()}
        sample.trajectory.score = SimpleNamespace(components=named, component=named.__getitem__)
        batch.greedy[sample.group] = inputs.greedy_rewards[row].item()
    mini_batches = [[row for row in rows if inputs.mini_batches[row] == number] for number in (0, 1)]
    columns = {"values": inputs.values[inside].numpy()}
    config = make_config({"algorithm": algorithm})
    return advantages.compute_advantages(batch, config, columns, 0.0, inputs.baseline, mini_batches)


@pytest.mark.parametrize("name", estimator_names())
def test_estimators(name: str) -> None:
    inputs, estimator = group_batch(), get_estimator(name)
    changes: list[dict[str, Any]] = [{}, *({field: OTHER[field]} for field in estimator.reads)]
    for algorithm in ALGORITHMS:
        for change in changes:
            options = algorithm.model_copy(update={"adv_estimator": name, **change})
            found = estimator(inputs, options)
            expected = compute_advantages(inputs, options)
            for matrix, column in zip((found.advantages, found.returns), expected, strict=True):
                assert matrix[inputs.mask.bool()].tolist() == pytest.approx(column.tolist(), abs=1e-12), change


ACTORS = [
    Actor(),
    Actor(clip_ratio=0.5),
    Actor(clip_ratio=0.5, clip_ratio_high=1.0),
    Actor(clip_ratio_low=0.3),
    Actor(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=1.5),
    Actor(tau_pos=2.0, tau_neg=4.0),
    Actor(clip_ratio_high=3.0, policy_loss={"cispo_mask_low": 0.1, "cispo_mask_high": 1.0}),
    Actor(policy_loss={"vespo_positive": (1.0, 0.0), "vespo_negative": (2.0, 3.0)}),
    Actor(policy_loss={"clip_cov_ratio": 0.3, "clip_cov_lb": 0.0, "kl_cov_ratio": 0.3, "ppo_kl_coef": 3.0}),
]


@pytest.mark.parametrize("name", policy_loss_names())
@pytest.mark.parametrize("is_constant", [True, False], ids=["advantages of rows", "advantages of tokens"])
def test_losses(name: str, is_constant: bool) -> None:
    """Values and gradients. Masked log-probs are NaN, one row is empty, and two log-ratios are beyond the clamp."""
    loss, generator = get_policy_loss(name), torch.Generator().manual_seed(0)
    is_constant |= loss.level == "sequence"  # which takes no others
    mask = (torch.rand(6, 5, generator=generator) < 0.7).double()
    mask[:4, 0], mask[-1] = 1.0, 0.0
    start, drift, signs = (torch.randn(6, 5, generator=generator, dtype=torch.float64) for _ in range(3))
    start = -0.1 - start.abs()
    old = (start - 0.6 * drift).clamp(max=-0.01)
    start[:2, 0], old[:2, 0] = torch.tensor([-1.0, -26.0]), torch.tensor([-26.0, -1.0])
    given = (signs[:, :1].expand(6, 5) if is_constant else signs) * mask
    for actor in ACTORS:
        logp = torch.where(mask.bool(), start, math.nan).requires_grad_()
        inputs = with_choice(PolicyLossInputs(logp, old, given, mask), loss, actor)
        output = loss(inputs, actor)
        found = (output.loss + output.penalty)[mask.bool() if loss.level == "token" else mask.bool().any(1)]
        found.sum().backward()

        own = start.clone().requires_grad_()
        columns = {"logp": own, "old": old, "advantages": given}
        columns |= {} if inputs.selected_tokens is None else {"selected": inputs.selected_tokens}
        section = make_config({"actor_rollout_ref.actor": actor, LOSS: name}).actor_rollout_ref.actor
        terms = [x for x in make_terms(mask, make_samples(mask), columns) if len(x.logp)]
        parts = [sum(losses.policy_loss(x, section, None)) for x in terms]
        expected = torch.cat(parts) if loss.level == "token" else torch.stack(parts)
        expected.sum().backward()
        for one, other in ((found, expected), (logp.grad, own.grad)):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("method", "level"), [*product(["tis", "mask"], ["token", "sequence", "geometric"])])
def test_correction_weights(method: Any, level: Any) -> None:
    """The log-probs of masked tokens do not matter, and the weights have no gradient."""
    mask = torch.tensor([[1, 1, 0], [0, 1, 0], [1, 1, 1]], dtype=torch.float64)
    trainer = torch.tensor([[0.5, 4.0, 7.0], [9.0, 2.0, 1.0], [0.8, 1.1, 1.2]]).double().log().requires_grad_()
    for low, high in ((None, 2.0), (0.9, 2.0), (0.5, None), (0.9, 1.3)):
        found = rollout_correction_weights(trainer, 0 * mask, mask, method=method, level=level, low=low, high=high)
        options = {"method": method, "level": level, "low": low, "high": high}
        config = make_config({CORRECTION + name: value for name, value in options.items()})
        columns = {"logp": trainer, "old": trainer.detach(), "engine": 0 * mask, "advantages": mask}
        terms = make_terms(mask, make_samples(mask), columns)
        expected = torch.cat([losses.correction(x, config.algorithm.rollout_correction) for x in terms])
        torch.testing.assert_close(found[mask.bool()], expected)
        assert not found.requires_grad and not found[mask == 0].any()


@pytest.mark.parametrize("mode", get_args(AggregationMode))
def test_aggregation(mode: Any) -> None:
    mask, groups = (torch.arange(5) < torch.tensor([[4], [2], [5], [1], [3]])).double(), [0, 0, 1, 1, 1]
    config = make_config({f"{ACTOR}loss_scale_factor": 7.0})
    expected = losses.weigh(make_samples(mask, groups), config, mode)
    assert row_weights(mask.sum(1), torch.tensor(groups), mode, 7.0).tolist() == pytest.approx(expected)
