import math
from dataclasses import replace

import pytest
import torch

from alphaapollo.algorithms.policy_losses import (
    PolicyLossInputs,
    PolicyLossOutput,
    get_policy_loss,
    policy_loss_names,
    register_policy_loss,
)
from alphaapollo.config.schema import Actor
from alphaapollo.config.schema import PolicyLossOptions as Options
from tests.unit.algorithms.batches import with_choice


def inputs(ratios: list[list[float]], advantages: list[list[float]], mask: list[list[int]]) -> PolicyLossInputs:
    """Old log-probs are -1, with arbitrary values outside the mask."""
    mask_matrix = torch.tensor(mask, dtype=torch.float64)
    logp = torch.tensor(ratios, dtype=torch.float64).log() - 1.0
    garbage = torch.full_like(logp, math.nan)
    logp = torch.where(mask_matrix > 0, logp, garbage).requires_grad_()
    old = torch.full_like(logp, -1.0)
    return PolicyLossInputs(logp, old, torch.tensor(advantages, dtype=torch.float64), mask_matrix)


def evaluate(name: str, batch: PolicyLossInputs, actor: Actor | None = None) -> tuple[list, list, dict[str, float]]:
    """Loss and gradient of the sum over tokens or rows, and the metrics."""
    loss = get_policy_loss(name)
    output = loss(with_choice(batch, loss, actor or Actor()), actor or Actor())
    counts = batch.mask if loss.level == "token" else batch.mask.amax(1)
    kept = torch.where(counts > 0, output.loss, 0.0)
    kept.sum().backward()
    metrics = {key: value.item() for key, value in output.metrics.items()}
    return kept.tolist(), batch.logp.grad.tolist(), metrics


def test_ppo_by_hand():
    # ratios above, inside and below the clip, both signs of A
    batch = inputs([[1.5, 1.1, 0.5], [1.5, 1.1, 0.5]], [[2.0] * 3, [-2.0] * 3], [[1, 1, 1], [1, 1, 0]])
    loss, gradient, metrics = evaluate("ppo", batch)
    assert loss == [pytest.approx([-2.4, -2.2, -1.0]), pytest.approx([3.0, 2.2, 0.0])]
    assert gradient == [pytest.approx([0.0, -2.2, -1.0]), pytest.approx([3.0, 2.2, 0.0])]
    assert metrics["pg_clipfrac"] == 1.0  # tokens, to be divided by the global count


def test_ppo_kl_by_hand():
    # the penalty r - 1 - log r has the gradient r - 1
    for coef, given in ((0.5, 0.5), (3.0, None)):
        batch = inputs([[1.5, 0.5]], [[2.0, -2.0]], [[1, 1]])
        actor = Actor(policy_loss={"loss_mode": "ppo_kl", "ppo_kl_coef": 3.0})
        loss, gradient, metrics = evaluate("ppo_kl", replace(batch, kl_coef=given), actor)
        assert loss == [pytest.approx([-3.0 + coef * (0.5 - math.log(1.5)), 1.0 + coef * (-0.5 - math.log(0.5))])]
        assert gradient == [pytest.approx([-3.0 + coef * 0.5, 1.0 - coef * 0.5])]
        assert metrics["policy_kl_coef"] == 2 * coef  # a sum over tokens
    batch = inputs([[1.5, 0.5]], [[2.0, -2.0]], [[1, 1]])
    assert evaluate("surrogate", batch)[:2] == ([pytest.approx([-3.0, 1.0])], [pytest.approx([-3.0, 1.0])])


def test_clip_higher_and_dual_clip():
    batch = inputs([[1.27, 1.3, 9.0, 0.1]], [[1.0, 1.0, -1.0, -1.0]], [[1, 1, 1, 1]])
    actor = Actor(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=3.0)
    loss, gradient, metrics = evaluate("ppo", batch, actor)
    assert loss == [pytest.approx([-1.27, -1.28, 3.0, 0.8])]
    assert gradient == [pytest.approx([-1.27, 0.0, 0.0, 0.0])]
    assert (metrics["pg_clipfrac"], metrics["pg_clipfrac_lower"]) == (2.0, 1.0)


def test_clip_ratio_sets_both_bounds_unless_given():
    def loss(actor: Actor) -> list[float]:
        return evaluate("ppo", inputs([[3.0, 0.1]], [[1.0, -1.0]], [[1, 1]]), actor)[0][0]

    assert loss(Actor(clip_ratio=0.5)) == pytest.approx([-1.5, 0.5])
    assert loss(Actor(clip_ratio=0.5, clip_ratio_high=1.0)) == pytest.approx([-2.0, 0.5])
    assert loss(Actor(clip_ratio_low=0.3)) == pytest.approx([-1.2, 0.7])


def test_gspo_by_hand():
    # row 0: geometric mean sqrt(4 * 1) = 2, clipped at 1.2; row 1: the same ratio, A < 0; row 2: empty
    batch = inputs([[4.0, 1.0], [4.0, 1.0], [1.0, 1.0]], [[1.0] * 2, [-1.0] * 2, [1.0] * 2], [[1, 1], [1, 1], [0, 0]])
    loss, gradient, metrics = evaluate("gspo", batch, Actor(clip_ratio=0.2))
    assert loss == pytest.approx([-1.2, 2.0, 0.0])
    assert gradient == [[0.0, 0.0], pytest.approx([1.0, 1.0]), [0.0, 0.0]]
    assert metrics["pg_clipfrac"] == 1.0


def test_gspo_clips_at_the_papers_bounds_by_default():
    batch = inputs([[1.1, 1.0], [0.9, 1.0]], [[1.0] * 2, [-1.0] * 2], [[1, 0], [1, 0]])
    assert evaluate("gspo", batch)[0] == pytest.approx([-1.0004, 0.9997])


def test_sequence_ppo_takes_the_product():
    batch = inputs([[4.0, 0.5]], [[-1.0] * 2], [[1, 1]])
    loss, gradient, _ = evaluate("sequence_ppo", batch)
    assert loss == pytest.approx([2.0])
    assert gradient == [pytest.approx([2.0, 2.0])]


MASKED = Options(cispo_mask_low=0.2, cispo_mask_high=0.28)


@pytest.mark.parametrize(
    ("actor", "ratios", "advantages", "gradient"),
    [
        (Actor(), [5.0, 0.01], [1.0, 2.0], [-1.28, -0.02]),  # constant weights, no lower bound
        (Actor(clip_ratio_low=0.2), [0.5], [1.0], [-0.8]),
        # the unified mask
        (Actor(clip_ratio_high=3.0, policy_loss=MASKED), [1.5, 1.5, 0.5, 0.5], [1.0, -1.0] * 2, [0.0, 1.5, -0.5, 0.0]),
    ],
)
def test_cispo(actor: Actor, ratios: list[float], advantages: list[float], gradient: list[float]):
    assert evaluate("cispo", inputs([ratios], [advantages], [[1] * len(ratios)]), actor)[1] == [pytest.approx(gradient)]


def test_sapo_by_hand():
    batch = inputs([[1.0, 1.0]], [[1.0, -1.0]], [[1, 1]])
    loss, gradient, _ = evaluate("sapo", batch, Actor(tau_pos=2.0, tau_neg=4.0))
    assert loss == [pytest.approx([-1.0, 0.5])]  # 2 A / tau at ratio 1
    assert gradient == [pytest.approx([-1.0, 1.0])]


def test_gmpo_clips_in_log_space_on_one_side():
    # log-ratios 1 (held at 0.4 where A >= 0) and -1 (held at -0.4 where A < 0)
    ratios = [math.e, 1 / math.e]
    batch = inputs([ratios, ratios], [[1.0] * 2, [-1.0] * 2], [[1, 1], [1, 1]])
    loss, gradient, metrics = evaluate("gmpo", batch)
    assert loss == pytest.approx([-math.exp(-0.3), math.exp(0.3)])
    assert gradient == [pytest.approx([0.0, -math.exp(-0.3) / 2]), pytest.approx([math.exp(0.3) / 2, 0.0])]
    assert metrics["pg_clipfrac"] == 1.0  # half the tokens of each of two rows


@pytest.mark.parametrize("name", ["reinforce", "gpg"])
def test_plain_policy_gradient(name: str):
    _, gradient, _ = evaluate(name, inputs([[3.0, 1.0]], [[2.0, -1.0]], [[1, 1]]))
    assert gradient == [[-2.0, 1.0]]


def test_clip_cov_drops_a_drawn_share():
    # log-probs 0, -1, -2, -1 beside A 2, 0, -2, 0: covariances 2, 0, 2, 0; both high ones are unclipped at ratio 1
    logp = torch.tensor([[0.0, -1.0, -2.0, -1.0]], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([[2.0, 0.0, -2.0, 0.0]], dtype=torch.float64)
    batch = PolicyLossInputs(logp, logp.detach(), advantages, torch.ones(1, 4, dtype=torch.float64))
    loss, gradient, metrics = evaluate("clip_cov", batch, Actor(policy_loss=Options(clip_cov_ratio=0.25)))
    assert metrics["clip_cov_fraction"] == 1.0
    assert loss == [[0.0, 0.0, 2.0, 0.0]]  # the first of the two that stand there: they come in random order
    assert gradient == [[0.0, 0.0, 2.0, 0.0]]


def test_kl_cov_penalises_the_top_share():
    logp = torch.tensor([[0.0, -1.0, -2.0, -1.0]], dtype=torch.float64, requires_grad=True)
    old = logp.detach() - math.log(2.0)
    advantages = torch.tensor([[3.0, 0.0, -1.0, 0.0]], dtype=torch.float64)
    batch = PolicyLossInputs(logp, old, advantages, torch.ones(1, 4, dtype=torch.float64))
    options = Options(kl_cov_ratio=0.25, ppo_kl_coef=10.0)
    loss, gradient, metrics = evaluate("kl_cov", batch, Actor(policy_loss=options))
    assert metrics["kl_cov_fraction"] == 1.0
    assert loss == [pytest.approx([-6.0 + 10.0 * math.log(2.0), 0.0, 2.0, 0.0])]
    assert gradient == [pytest.approx([-6.0 + 10.0, 0.0, 2.0, 0.0])]


@pytest.mark.parametrize("name", policy_loss_names())
def test_no_nan_where_everything_is_masked_or_extreme(name: str):
    masked = inputs([[2.0, 1.0]], [[1.0, 1.0]], [[0, 0]])
    loss, gradient, metrics = evaluate(name, masked)
    assert not any(torch.tensor(loss).flatten())
    assert not torch.tensor(gradient).any()
    assert all(math.isfinite(value) for value in metrics.values())
    logp = torch.tensor([[-0.0, -800.0]] * 2, requires_grad=True)
    extreme = PolicyLossInputs(logp, logp.detach().flip(1), torch.tensor([[1.0] * 2, [-1.0] * 2]), torch.ones(2, 2))
    loss, gradient, metrics = evaluate(name, extreme)
    assert torch.tensor(loss).isfinite().all()
    assert torch.tensor(gradient).isfinite().all()
    assert all(math.isfinite(value) for value in metrics.values())


def test_old_policy_kl_is_zero_on_policy_and_summed_over_tokens():
    assert evaluate("ppo", inputs([[1.0, 1.0]], [[1.0] * 2], [[1, 1]]))[2]["old_policy_kl"] == 0.0
    metrics = evaluate("ppo", inputs([[2.0, 2.0]], [[1.0] * 2], [[1, 1]]))[2]
    assert metrics["old_policy_kl"] == pytest.approx(2 * (1.0 - math.log(2.0)))
    metrics = evaluate("gspo", inputs([[2.0, 2.0]], [[1.0] * 2], [[1, 1]]))[2]
    assert metrics["old_policy_kl"] == pytest.approx(1.0 - math.log(2.0))  # one row


def test_levels():
    sequence = {"gspo", "gmpo", "sequence_ppo"}
    assert {name for name in policy_loss_names() if get_policy_loss(name).level == "sequence"} == sequence


def test_the_shape_of_a_loss_is_checked():
    register_policy_loss("row_in_disguise")(lambda batch, config: PolicyLossOutput(batch.logp.sum(1)))
    with pytest.raises(ValueError, match=r"level=token.* \(1, 2\), but got .*\(1,\)"):
        get_policy_loss("row_in_disguise")(inputs([[1.0, 1.0]], [[1.0] * 2], [[1, 1]]), Actor())


def test_unknown_losses_suggest_similar_names():
    with pytest.raises(ValueError, match=r"'gsop'.*'gspo'"):
        get_policy_loss("gsop")
