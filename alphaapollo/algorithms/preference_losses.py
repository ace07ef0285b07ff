"""Preference losses by name: each says what it needs, and gives one number a pair, or an answer.

    log-probs of whole answers (summed), their lengths, the reference's -> Answers -> loss -> [P] or [R]

@register_preference_loss("mine", reads=("beta",))
def mine(answers: Answers, beta: float, config: Preference) -> Tensor:
    return -logsigmoid(beta * answers.margin)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from alphaapollo.algorithms import preference
from alphaapollo.config.schema import Preference
from alphaapollo.utils.registry import Registry

EXO_SMOOTHING = 1e-3  # the paper's


@dataclass(frozen=True)
class Answers:
    """R answers of a micro-batch. Of pairs the chosen ones stand at even places, each before its rejected one. Only
    `logp` has a gradient."""

    logp: Tensor  # [R] log-prob of the answer: summed over its tokens
    lengths: Tensor  # [R] these tokens, at least 1
    good: Tensor  # bool [R] chosen, or labelled as desirable
    ref_logp: Tensor | None = None  # [R] the reference's, where the loss needs it
    kl: Tensor | None = None  # scalar: of the whole mini-batch, where the loss needs it

    @property
    def log_ratio(self) -> Tensor:
        """log pi/ref of each. [R]"""
        assert self.ref_logp is not None, "the loss was declared without a reference"
        return self.logp - self.ref_logp

    @property
    def mean(self) -> Tensor:
        """Log-prob a token. [R]"""
        return self.logp / self.lengths

    @property
    def margin(self) -> Tensor:
        """Log-ratio of the chosen minus that of the rejected. [P]"""
        return chosen(self.log_ratio) - rejected(self.log_ratio)


def chosen(values: Tensor) -> Tensor:
    """Of pairs. [R] -> [P]"""
    return values[0::2]


def rejected(values: Tensor) -> Tensor:
    return values[1::2]


LossFn = Callable[[Answers, float, Preference], Tensor]


class Judged(NamedTuple):
    """Of P pairs, or of R single answers."""

    losses: Tensor  # [P] or [R]
    right: Tensor  # bool, as losses: the chosen answer has the higher reward; a single one is on its side of the KL
    figures: dict[str, Tensor]  # sums over all losses, and over the answers of each side


@dataclass(frozen=True)
class PreferenceLoss:
    """A registered loss: `(answers, beta, config.preference) -> [P]`, or [R] where it is of single answers."""

    name: str
    fn: LossFn
    beta: float = 0.1  # where preference.beta is null
    reads: tuple[str, ...] = ()  # keys of the section that it reads
    needs_reference: bool = True
    of_means: bool = False  # it compares log-probs a token, and so do its rewards
    of_pairs: bool = True  # false: of single answers with a label; needs the KL
    sums_target: bool = False  # preference.sft_coef weighs the chosen answer's summed log-prob, not its mean

    def rewards(self, answers: Answers, beta: float) -> Tensor:
        """What the policy implicitly thinks of each answer: beta times its log-ratio (log-prob, without a reference).
        [R]"""
        values = answers.log_ratio if self.needs_reference else answers.logp
        return beta * (values / answers.lengths if self.of_means else values)

    def __call__(self, answers: Answers, config: Preference) -> Judged:
        beta = self.beta if config.beta is None else config.beta
        losses = self.fn(answers, beta, config)
        if config.sft_coef and "sft_coef" in self.reads:
            losses = losses - config.sft_coef * chosen(answers.logp if self.sums_target else answers.mean)
        with torch.no_grad():
            rewards = self.rewards(answers, beta)
            return Judged(losses, self._right(answers, rewards, beta), self._figures(answers, rewards, losses))

    def _right(self, answers: Answers, rewards: Tensor, beta: float) -> Tensor:
        if self.of_pairs:
            return chosen(rewards) > rejected(rewards)
        assert answers.kl is not None
        return (rewards > beta * answers.kl.clamp(min=0.0)) == answers.good

    @staticmethod
    def _figures(answers: Answers, rewards: Tensor, losses: Tensor) -> dict[str, Tensor]:
        good = answers.good
        return {
            "loss": losses.sum(),
            "chosen": good.sum(),
            "rejected": (~good).sum(),
            "reward_chosen": rewards[good].sum(),
            "reward_rejected": rewards[~good].sum(),
            "logp_chosen": answers.logp[good].sum(),
            "logp_rejected": answers.logp[~good].sum(),
        }


def figures_of(sums: Mapping[str, float]) -> dict[str, float]:
    """Sums over all micro-batches and ranks -> means; `compared`: pairs, or single answers. Of a side without an answer
    there is none."""
    figures = {"loss": sums["loss"] / sums["compared"]}
    for side in ("chosen", "rejected"):
        if sums[side]:
            figures |= {f"{name}_{side}": sums[f"{name}_{side}"] / sums[side] for name in ("reward", "logp")}
    if sums["chosen"] and sums["rejected"]:
        figures["margin"] = figures["reward_chosen"] - figures["reward_rejected"]
    if "kl" in sums:
        figures["kl"] = max(0.0, sums["kl"] / sums["compared"])
    return figures


_losses: Registry[PreferenceLoss] = Registry("preference loss")


def register_preference_loss(
    name: str,
    *,
    beta: float = 0.1,
    reads: tuple[str, ...] = ("beta",),
    needs_reference: bool = True,
    of_means: bool = False,
    of_pairs: bool = True,
    sums_target: bool = False,
) -> Callable[[LossFn], LossFn]:
    """Decorator: register `fn` under preference.loss=name. The options are the fields of PreferenceLoss."""

    def add(fn: LossFn) -> LossFn:
        loss = PreferenceLoss(name, fn, beta, reads, needs_reference, of_means, of_pairs, sums_target)
        _losses.register(name)(loss)
        return fn

    return add


def get_preference_loss(name: str) -> PreferenceLoss:
    """The loss of that name. Raises ValueError with the known and the nearest names."""
    return _losses.get(name)


def check_preference(config: Preference) -> PreferenceLoss:
    """The loss that is asked for, tried on a made-up pair. Raises ValueError for an unknown one, and for values of its
    keys that it cannot take."""
    loss = get_preference_loss(config.loss)
    ones = torch.ones(2, dtype=torch.float64)
    loss(Answers(-ones, ones, torch.tensor([True, False]), -ones, torch.zeros(())), config)
    return loss


def preference_loss_names() -> list[str]:
    return _losses.names()


@register_preference_loss("sigmoid", reads=("beta", "label_smoothing", "sft_coef"))
def _sigmoid(answers: Answers, beta: float, config: Preference) -> Tensor:
    return preference.dpo(answers.margin, beta, config.label_smoothing or 0.0)


@register_preference_loss("robust", reads=("beta", "label_smoothing", "sft_coef"))
def _robust(answers: Answers, beta: float, config: Preference) -> Tensor:
    return preference.robust_dpo(answers.margin, beta, config.label_smoothing or 0.0)


@register_preference_loss("ipo", reads=("beta", "sft_coef"))
def _ipo(answers: Answers, beta: float, config: Preference) -> Tensor:
    return preference.ipo(answers.margin, beta)


@register_preference_loss("ipo_mean", reads=("beta", "sft_coef"), of_means=True)
def _ipo_mean(answers: Answers, beta: float, config: Preference) -> Tensor:
    means = answers.log_ratio / answers.lengths
    return preference.ipo(chosen(means) - rejected(means), beta)


@register_preference_loss("hinge", reads=("beta", "sft_coef"))
def _hinge(answers: Answers, beta: float, config: Preference) -> Tensor:
    return preference.hinge(answers.margin, beta)


@register_preference_loss("slic", beta=1.0, reads=("slic_delta", "sft_coef"), needs_reference=False, sums_target=True)
def _slic(answers: Answers, beta: float, config: Preference) -> Tensor:
    return preference.slic(chosen(answers.logp), rejected(answers.logp), config.slic_delta)


@register_preference_loss("exo_pair", reads=("beta", "label_smoothing", "sft_coef"))
def _exo_pair(answers: Answers, beta: float, config: Preference) -> Tensor:
    smoothing = EXO_SMOOTHING if config.label_smoothing is None else config.label_smoothing
    return preference.exo_pair(answers.margin, beta, smoothing)


@register_preference_loss("nca_pair", reads=("beta", "sft_coef"))
def _nca_pair(answers: Answers, beta: float, config: Preference) -> Tensor:
    return preference.nca_pair(chosen(answers.log_ratio), rejected(answers.log_ratio), beta)


@register_preference_loss("sppo_hard", beta=1e-3, reads=("beta", "sft_coef"))
def _sppo_hard(answers: Answers, beta: float, config: Preference) -> Tensor:
    return preference.sppo_hard(chosen(answers.log_ratio), rejected(answers.log_ratio), beta)


@register_preference_loss("apo_zero", reads=("beta", "sft_coef"))
def _apo_zero(answers: Answers, beta: float, config: Preference) -> Tensor:
    return preference.apo_zero(chosen(answers.log_ratio), rejected(answers.log_ratio), beta)


@register_preference_loss("apo_down", reads=("beta", "sft_coef"))
def _apo_down(answers: Answers, beta: float, config: Preference) -> Tensor:
    return preference.apo_down(chosen(answers.log_ratio), rejected(answers.log_ratio), beta)


@register_preference_loss("kto", reads=("beta", "kto_desirable_weight", "kto_undesirable_weight"), of_pairs=False)
def _kto(answers: Answers, beta: float, config: Preference) -> Tensor:
    assert answers.kl is not None
    weights = config.kto_desirable_weight, config.kto_undesirable_weight
    return preference.kto(answers.log_ratio, answers.good, answers.kl, beta, *weights)


@register_preference_loss("orpo", reads=("beta",), needs_reference=False, of_means=True)
def _orpo(answers: Answers, beta: float, config: Preference) -> Tensor:
    return preference.orpo(chosen(answers.mean), rejected(answers.mean), beta)


@register_preference_loss(
    "simpo", beta=2.0, reads=("beta", "simpo_gamma", "sft_coef"), needs_reference=False, of_means=True
)
def _simpo(answers: Answers, beta: float, config: Preference) -> Tensor:
    return preference.simpo(chosen(answers.mean), rejected(answers.mean), beta, config.simpo_gamma)
