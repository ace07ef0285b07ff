"""The project and the reference compute the same of random inputs, with each option of estimators, losses, KL,
divergences, correction weights and aggregation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch

from alphaapollo.algorithms.advantages import AdvantageInputs, estimator_names, get_estimator
from alphaapollo.algorithms.aggregation import row_weights
from alphaapollo.algorithms.kl import ESTIMATORS, Divergence, kl_penalty, subtract_kl, unbiased_kl
from alphaapollo.algorithms.mismatch import off_policy_sequence_mask, rollout_correction_weights
from alphaapollo.algorithms.policy_losses import PolicyLossInputs, get_policy_loss, policy_loss_names
from alphaapollo.algorithms.reward_shaping import soft_overlong_punishment
from alphaapollo.algorithms.value_loss import value_loss
from alphaapollo.config.schema import Actor, AggregationMode, Algorithm, RolloutCorrection
from alphaapollo.models.lm_head import DivergenceTarget
from alphaapollo.plugins.verify.reference import advantages, losses, samples
from alphaapollo.workers.policy_objective import ObjectiveInputs, compute_policy_objective
from tests.golden.functions import head_input, head_stats
from tests.plugins.verify.reference_batches import ACTOR, CORRECTION, LOSS, make_config, make_samples, make_terms
from tests.unit.algorithms.batches import with_choice
from tests.unit.algorithms.test_declarations import ALGORITHMS, OTHER, group_batch

OVERLONG = "algorithm.overlong_penalty."


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
@pytest.mark.parametrize(("dtype", "rtol", "atol"), [(torch.float64, 1e-10, 1e-12), (torch.float32, 1e-4, 2e-5)])
def test_losses(name: str, is_constant: bool, dtype: torch.dtype, rtol: float, atol: float) -> None:
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
        logp = torch.where(mask.bool(), start, math.nan).to(dtype).requires_grad_()
        inputs = with_choice(PolicyLossInputs(logp, *(x.to(dtype) for x in (old, given, mask))), loss, actor)
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
            torch.testing.assert_close(one.double(), other, rtol=rtol, atol=atol)


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


CORRECTIONS: list[dict[str, Any]] = [
    {},
    {"off_policy_mask_threshold": 0.1},
    {"method": "tis", "level": "geometric", "low": 0.9},
    {"method": "mask", "level": "sequence", "low": 0.5, "off_policy_mask_threshold": 0.1},
]


@pytest.mark.parametrize("name", policy_loss_names())
def test_objectives(name: str) -> None:
    """Value and gradient of the loss of a micro-batch: corrections weight the policy loss, but neither its penalty nor
    the KL and the entropy."""
    loss, (logp, drift, noise, ref, entropy) = get_policy_loss(name), random_columns(5)
    mask, signs = (torch.arange(6) < torch.tensor([[6], [4], [1], [3]])).double(), torch.tensor([1.0, -1.0, 1.0, -2.0])
    engine = (logp := -0.2 - logp.abs()) - 0.3 * drift
    old = engine if loss.anchor == "rollout" else engine + 0.2 * noise
    for correction in map(RolloutCorrection.model_validate, CORRECTIONS[: 2 if loss.anchor == "rollout" else None]):
        for kind in ("k3+", "unbiased"):
            actor = Actor(entropy_coeff=0.1, use_kl_loss=True, kl_loss_coef=0.2, kl_loss_type=kind)
            actor = actor.model_copy(update={"policy_loss": actor.policy_loss.model_copy(update={"loss_mode": name})})
            config = make_config({"actor_rollout_ref.actor": actor, "algorithm.rollout_correction": correction})
            rows = make_samples(mask)
            of_token, of_sample = (
                losses.weigh(rows, config, mode) for mode in ("seq-mean-token-mean", "seq-mean-token-sum")
            )
            own, other = (logp.clone().requires_grad_() for _ in range(2))
            inputs = ObjectiveInputs(
                logp=own,
                old_logp=old,
                advantages=signs[:, None] * mask,
                mask=mask,
                rollout_logp=engine,
                ref_logp=ref,
                entropy=entropy,
                loss_weights=torch.tensor(of_token),
                sequence_weights=torch.tensor(of_sample),
                divergence_weights=torch.zeros(4),
            )
            inputs = with_choice(inputs, loss, actor)
            found, _ = compute_policy_objective(inputs, actor, loss, correction)
            columns = {"logp": other, "old": old, "engine": engine, "ref": ref, "entropy": entropy}
            columns |= {} if inputs.selected_tokens is None else {"selected": inputs.selected_tokens}
            terms = make_terms(mask, rows, columns | {"advantages": signs})
            weights = zip(terms, of_token, of_sample, strict=True)
            expected = sum(losses.loss_of_sample(x, one, sample, config, None) for x, one, sample in weights)
            found.backward()
            expected.backward()
            torch.testing.assert_close(found.double(), expected)
            torch.testing.assert_close(own.grad, other.grad)


def random_columns(count: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(4, 6, generator=generator, dtype=torch.float64) for _ in range(count))


@pytest.mark.parametrize("kind", [*ESTIMATORS, *(f"{name}+" for name in ESTIMATORS), "unbiased"])
def test_kl_to_the_reference(kind: str) -> None:
    """Values and gradients in the loss, and values in the reward."""
    logp, ref, engine, rewards = random_columns(4)
    mask, found = torch.ones_like(logp), []
    own, other = logp.clone().requires_grad_(), logp.clone().requires_grad_()
    found = unbiased_kl(own, engine, ref, mask) if kind == "unbiased" else kl_penalty(own, ref, kind)
    expected = losses.reference_kl(SimpleNamespace(logp=other, ref=ref, engine=engine), kind)
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(own.grad, other.grad)
    if kind in ESTIMATORS:
        mask[1], mask[2, 3] = 0.0, 0.0
        flat = (x.flatten() for x in (rewards, logp, ref, mask))
        shaped = subtract_kl(*flat, torch.full((4,), 6), 0.3, kind)
        kl = torch.from_numpy(advantages.kl_estimate((logp - ref).numpy(), kind)) * mask
        torch.testing.assert_close(shaped.token_rewards, (rewards - 0.3 * kl).flatten())
        # row 1 is empty
        assert shaped.kl_per_sequence.item() == pytest.approx(kl.sum().item() / 3)
        assert shaped.kl_per_token.item() == pytest.approx((kl.sum(1) / mask.sum(1).clamp(min=1)).sum().item() / 3)


@pytest.mark.parametrize("top_k", [None, 3])
@pytest.mark.parametrize("context", [None, "successes"])
@pytest.mark.parametrize(("kind", "beta"), [("reverse", 0.5), ("forward", 0.5), ("jsd", 0.3)])
def test_divergences(kind: Any, beta: float, top_k: int | None, context: str | None) -> None:
    """Values and gradients of the trainer's output head. The top k are the policy's tokens for a self-teacher."""
    logits, teacher = random_columns(2)
    own, other = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    of_policy = context is not None
    target = DivergenceTarget(head_input(teacher), Divergence(kind, beta), top_k=top_k, selects_policy_tokens=of_policy)
    found = head_stats(own, target).divergence
    assert found is not None
    section = SimpleNamespace(divergence=kind, beta=beta, top_k=top_k, self_teacher=SimpleNamespace(context=context))
    expected = losses.divergence(other.log_softmax(-1), teacher.log_softmax(-1), section)
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(own.grad, other.grad)


@pytest.mark.parametrize("clip", [None, 0.2])
def test_value_loss(clip: float | None) -> None:
    values, old, returns = random_columns(3)
    found, _ = value_loss(values, old, returns, torch.ones_like(values), clip)
    torch.testing.assert_close(found, losses.value_loss(values, old, returns, clip))


def test_off_policy_mask_and_overlong_penalty() -> None:
    logp, engine = random_columns(2)
    engine[0] = logp[0] + 1.0  # the policy has become less likely than 0.2 nats per token
    mask, given = (logp < 1).double(), torch.tensor([-1.0, -1.0, 1.0, -1.0]).expand(6, 4).T
    options = make_config({f"{CORRECTION}off_policy_mask_threshold": 0.2}).algorithm.rollout_correction
    columns = {"logp": logp, "old": logp, "engine": engine, "advantages": given}
    expected = torch.cat([losses.correction(x, options) for x in make_terms(mask, make_samples(mask), columns)])
    found = off_policy_sequence_mask(logp, engine, given, mask, 0.2)
    torch.testing.assert_close(found[mask.bool()], expected)
    assert len(expected.unique()) == 2
    config = make_config({OVERLONG + "enable": True, OVERLONG + "cache": 4, OVERLONG + "factor": 0.5})
    config.data.max_response_length = 10
    lengths = torch.arange(1.0, 13.0)
    rows = [SimpleNamespace(response_length=int(length)) for length in lengths]
    trajectories = [SimpleNamespace(score=SimpleNamespace(reward=0.0), rows=[row]) for row in rows]
    expected = [samples.outcome_reward(None, one, config) for one in trajectories]
    assert soft_overlong_punishment(lengths, 10, 4, 0.5).tolist() == pytest.approx(expected)
