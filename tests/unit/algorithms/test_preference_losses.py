from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from alphaapollo.algorithms.preference_losses import (
    AnswerBatch,
    bradley_terry,
    compute_preference_metrics,
    get_preference_loss,
    preference_loss_names,
)
from alphaapollo.config.schema import Preference

# One pair: log-probs -4 and -6 of 2 and 4 tokens, the reference's -5 and -5. So u = 1, v = -1, h = 2.
PAIR = AnswerBatch(
    logp=torch.tensor([-4.0, -6.0], dtype=torch.float64),
    lengths=torch.tensor([2.0, 4.0], dtype=torch.float64),
    is_desirable=torch.tensor([True, False]),
    ref_logp=torch.tensor([-5.0, -5.0], dtype=torch.float64),
    kl=torch.tensor(0.5, dtype=torch.float64),
)


def s(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


def odds(mean: float) -> float:
    return math.exp(mean) / (1.0 - math.exp(mean))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"loss": "sigmoid"}, [-math.log(s(0.2))]),
        ({"loss": "sigmoid", "beta": 0.5, "label_smoothing": 0.1}, [-0.9 * math.log(s(1)) - 0.1 * math.log(s(-1))]),
        ({"loss": "robust", "label_smoothing": 0.1}, [(-0.9 * math.log(s(0.2)) + 0.1 * math.log(s(-0.2))) / 0.8]),
        ({"loss": "ipo"}, [(2.0 - 5.0) ** 2]),
        ({"loss": "ipo", "beta": 0.25}, [0.0]),  # 1 / (2 tau) = 2
        ({"loss": "ipo_mean"}, [(1 / 2 + 1 / 4 - 5.0) ** 2]),
        ({"loss": "hinge"}, [0.8]),
        ({"loss": "hinge", "beta": 1.0}, [0.0]),
        ({"loss": "slic"}, [0.0]),
        ({"loss": "slic", "slic_delta": 3.0, "sft_coef": 0.5}, [1.0 + 0.5 * 4.0]),
        ({"loss": "sigmoid", "sft_coef": 0.5}, [-math.log(s(0.2)) + 0.5 * 2.0]),
        ({"loss": "exo_pair"}, [s(0.2) * math.log(s(0.2) / 0.999) + s(-0.2) * math.log(s(-0.2) / 0.001)]),
        ({"loss": "nca_pair"}, [-math.log(s(0.1)) - 0.5 * math.log(s(-0.1)) - 0.5 * math.log(s(0.1))]),
        ({"loss": "sppo_hard"}, [(1 - 500.0) ** 2 + (-1 + 500.0) ** 2]),
        ({"loss": "apo_zero"}, [1 - s(0.1) + s(-0.1)]),
        ({"loss": "apo_down"}, [s(0.1) + 1 - s(0.2)]),
        ({"loss": "kto", "kto_undesirable_weight": 3.0}, [1 - s(0.1 * 0.5), 3 * (1 - s(0.1 * 1.5))]),
        ({"loss": "orpo"}, [2.0 - 0.1 * math.log(s(math.log(odds(-2.0) / odds(-1.5))))]),
        ({"loss": "simpo"}, [-math.log(s(2.0 * (-2.0 + 1.5) - 1.0))]),
    ],
)
def test_by_hand(keys: dict, expected: list[float]):
    config = Preference(**keys)
    assert get_preference_loss(config.loss)(PAIR, config).losses.tolist() == pytest.approx(expected, abs=1e-12)


def test_huge_margins_stay_finite():
    logp = torch.tensor([-500.0, 0.0, 0.0, -500.0], requires_grad=True)
    answers = AnswerBatch(logp, torch.ones(4), torch.tensor([True, False] * 2), torch.zeros(4))
    losses = get_preference_loss("sigmoid")(answers, Preference(beta=1.0)).losses
    losses.sum().backward()
    assert losses.tolist() == pytest.approx([500.0, 0.0])
    assert logp.grad.tolist() == pytest.approx([-1.0, 1.0, 0.0, 0.0])


def test_the_kl_of_kto_is_at_least_zero():
    config = Preference(loss="kto")
    below, zero = (replace(PAIR, kl=torch.tensor(value)) for value in (-1.0, 0.0))
    assert get_preference_loss("kto")(below, config).losses.equal(get_preference_loss("kto")(zero, config).losses)


@pytest.mark.parametrize(("name", "smoothing"), [("robust", 0.5), ("exo_pair", 0.0), ("exo_pair", 1.0)])
def test_label_smoothing_outside_its_range_is_an_error(name: str, smoothing: float):
    with pytest.raises(ValueError, match="label_smoothing"):
        get_preference_loss(name)(PAIR, Preference(loss=name, label_smoothing=smoothing))


@pytest.mark.parametrize("name", preference_loss_names())
def test_a_better_chosen_answer_lowers_every_loss(name: str):
    """IPO and SPPO have target margins of 5 and 500."""
    logp = PAIR.logp.clone().requires_grad_()
    answers = AnswerBatch(logp, PAIR.lengths, PAIR.is_desirable, PAIR.ref_logp, PAIR.kl)
    keys = {"slic_delta": 3.0} if name == "slic" else {}
    losses, _, figures = get_preference_loss(name)(answers, Preference(loss=name, **keys))
    assert len(losses) == (1 if get_preference_loss(name).is_pairwise else 2)
    losses.sum().backward()
    chosen, rejected = logp.grad.tolist()
    assert rejected > 0, "the rejected answer becomes less likely"
    assert chosen > 0 if name == "apo_down" else chosen < 0
    assert not any(figure.requires_grad for figure in figures.values())


@pytest.mark.parametrize("name", preference_loss_names())
def test_losses_read_their_declared_keys(name: str):
    """Only keys that a loss declares change it, and each of them does."""
    loss = get_preference_loss(name)
    others = {
        "beta": 0.7,
        "label_smoothing": 0.3,
        "simpo_gamma": 0.2,
        "slic_delta": 7.0,
        "kto_desirable_weight": 2.0,
        "kto_undesirable_weight": 2.0,
        "sft_coef": 0.3,
    }
    usual = loss(PAIR, Preference(loss=name))[0].tolist()
    for key, value in others.items():
        changed = loss(PAIR, Preference(loss=name, **{key: value}))[0].tolist() != usual
        assert changed == (key in loss.reads), key
    bare = AnswerBatch(PAIR.logp, PAIR.lengths, PAIR.is_desirable, None, PAIR.kl)
    if loss.needs_reference:
        with pytest.raises(AssertionError):
            loss(bare, Preference(loss=name))
    else:
        assert loss(bare, Preference(loss=name))[0].tolist() == usual


def test_figures_of_pairs():
    losses, right, sums = get_preference_loss("sigmoid")(PAIR, Preference())
    assert right.tolist() == [True]
    figures = compute_preference_metrics({name: float(value) for name, value in sums.items()} | {"examples": 1.0})
    rewards = {"reward_chosen": 0.1, "reward_rejected": -0.1, "margin": 0.2}
    expected = {"loss": losses.item(), "logp_chosen": -4.0, "logp_rejected": -6.0, **rewards}
    assert figures == pytest.approx(expected)


def test_figures_of_single_answers():
    """Rewards 0.1 and -0.1 compared with 0.1 * 0.5: the first is above, as it should be."""
    assert get_preference_loss("kto")(PAIR, Preference(loss="kto")).is_correct.tolist() == [True, True]
    bad = AnswerBatch(PAIR.logp, PAIR.lengths, torch.tensor([False, False]), PAIR.ref_logp, PAIR.kl)
    _, right, sums = get_preference_loss("kto")(bad, Preference(loss="kto"))
    assert right.tolist() == [False, True]
    totals = {name: float(value) for name, value in sums.items()}
    figures = compute_preference_metrics(totals | {"examples": 2.0, "kl": -1.0})
    assert figures["reward_rejected"] == 0.0 and figures["kl"] == 0.0
    assert not {"margin", "reward_chosen", "logp_chosen"} & figures.keys()


def test_bradley_terry_by_hand():
    chosen, rejected, margin = (torch.tensor([x, y]) for x, y in ((2.0, 0.5), (1.0, 1.5), (0.0, 0.5)))
    expected = [-math.log(s(1.0)) + 0.1 * 9.0, -math.log(s(-1.5)) + 0.1 * 4.0]
    assert bradley_terry(chosen, rejected, margin, 0.1).tolist() == pytest.approx(expected, abs=1e-6)
