"""Preference losses by name. Each declares what it needs and returns one loss per pair or per answer.

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

EXO_SMOOTHING = 1e-3  # the default of arXiv 2402.00856


@dataclass(frozen=True)
class AnswerBatch:
    """R answers of a micro-batch. With pairs, each chosen answer has an even index and its rejected answer follows it.
    Only `logp` has a gradient."""

    logp: Tensor  # [R] log-prob of the answer, summed over its tokens
    lengths: Tensor  # [R] tokens of the answer, at least 1
    good: Tensor  # bool [R] chosen, or labelled desirable
    ref_logp: Tensor | None = None  # [R] reference log-probs, if the loss needs them
    kl: Tensor | None = None  # scalar: KL of the whole mini-batch, if the loss needs it

    @property
    def log_ratio(self) -> Tensor:
        """log pi/ref of each answer. [R]"""
        assert self.ref_logp is not None, "the loss was declared without a reference"
        return self.logp - self.ref_logp

    @property
    def mean(self) -> Tensor:
        """Mean log-prob per token. [R]"""
        return self.logp / self.lengths

    @property
    def margin(self) -> Tensor:
        """Log-ratio of the chosen minus that of the rejected answer. [P]"""
        return chosen(self.log_ratio) - rejected(self.log_ratio)


def chosen(values: Tensor) -> Tensor:
    """Values of the chosen answers. [R] -> [P]"""
    return values[0::2]


def rejected(values: Tensor) -> Tensor:
    """Values of the rejected answers. [R] -> [P]"""
    return values[1::2]


LossFn = Callable[[AnswerBatch, float, Preference], Tensor]


class PreferenceLossOutput(NamedTuple):
    """Losses of P pairs or R single answers."""

    losses: Tensor  # [P] or [R]
    is_correct: (
        Tensor  # bool, like losses: the chosen answer has the higher reward; KTO: the reward agrees with the label
    )
    metric_sums: dict[str, Tensor]  # sums over all losses, and over the answers of each side


@dataclass(frozen=True)
class PreferenceLoss:
    """A registered loss: `(answers, beta, config.preference) -> [P]`, or [R] for a loss on single answers."""

    name: str
    fn: LossFn
    beta: float = 0.1  # used if preference.beta is null
    reads: tuple[str, ...] = ()  # keys of the `preference` section that it reads
    needs_reference: bool = True
    uses_token_means: bool = False  # compares log-probs per token, in the loss and in its rewards
    of_pairs: bool = True  # false: single answers with a label; needs the KL
    sft_on_summed_logp: bool = False  # preference.sft_coef weighs the chosen answer's summed log-prob, not its mean

    def rewards(self, answers: AnswerBatch, beta: float) -> Tensor:
        """Implicit reward of each answer: beta times its log-ratio (its log-prob if there is no reference). [R]"""
        values = answers.log_ratio if self.needs_reference else answers.logp
        return beta * (values / answers.lengths if self.uses_token_means else values)

    def __call__(self, answers: AnswerBatch, config: Preference) -> PreferenceLossOutput:
        beta = self.beta if config.beta is None else config.beta
        losses = self.fn(answers, beta, config)
        if config.sft_coef and "sft_coef" in self.reads:
            losses = losses - config.sft_coef * chosen(answers.logp if self.sft_on_summed_logp else answers.mean)
        with torch.no_grad():
            rewards = self.rewards(answers, beta)
            return PreferenceLossOutput(
                losses, self._is_correct(answers, rewards, beta), _metric_sums(answers, rewards, losses)
            )

    def _is_correct(self, answers: AnswerBatch, rewards: Tensor, beta: float) -> Tensor:
        if self.of_pairs:
            return chosen(rewards) > rejected(rewards)
        assert answers.kl is not None
        return (rewards > beta * answers.kl.clamp(min=0.0)) == answers.good


def _metric_sums(answers: AnswerBatch, rewards: Tensor, losses: Tensor) -> dict[str, Tensor]:
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


def preference_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Compute means from sums over all micro-batches and ranks. `compared` is the number of pairs or single answers.
    A side without answers has no metrics."""
    metrics = {"loss": sums["loss"] / sums["compared"]}
    for side in ("chosen", "rejected"):
        if sums[side]:
            metrics |= {f"{name}_{side}": sums[f"{name}_{side}"] / sums[side] for name in ("reward", "logp")}
    if sums["chosen"] and sums["rejected"]:
        metrics["margin"] = metrics["reward_chosen"] - metrics["reward_rejected"]
    if "kl" in sums:
        metrics["kl"] = max(0.0, sums["kl"] / sums["compared"])
    return metrics


_losses: Registry[PreferenceLoss] = Registry("preference loss")


def register_preference_loss(
    name: str,
    *,
    beta: float = 0.1,
    reads: tuple[str, ...] = ("beta",),
    needs_reference: bool = True,
    uses_token_means: bool = False,
    of_pairs: bool = True,
    sft_on_summed_logp: bool = False,
) -> Callable[[LossFn], LossFn]:
    """Decorator: register `fn` under preference.loss=name. The options are the fields of PreferenceLoss."""

    def add(fn: LossFn) -> LossFn:
        loss = PreferenceLoss(name, fn, beta, reads, needs_reference, uses_token_means, of_pairs, sft_on_summed_logp)
        _losses.register(name)(loss)
        return fn

    return add


def get_preference_loss(name: str) -> PreferenceLoss:
    """The loss with this name. Raises ValueError that lists the known and the most similar names."""
    return _losses.get(name)


def check_preference_loss(config: Preference) -> PreferenceLoss:
    """Return the configured loss after one call on a synthetic pair. Raises ValueError for an unknown loss and for
    invalid values of its keys."""
    loss = get_preference_loss(config.loss)
    ones = torch.ones(2, dtype=torch.float64)
    loss(AnswerBatch(-ones, ones, torch.tensor([True, False]), -ones, torch.zeros(())), config)
    return loss


def preference_loss_names() -> list[str]:
    return _losses.names()


@register_preference_loss("sigmoid", reads=("beta", "label_smoothing", "sft_coef"))
def _sigmoid(answers: AnswerBatch, beta: float, config: Preference) -> Tensor:
    return preference.dpo(answers.margin, beta, config.label_smoothing or 0.0)


@register_preference_loss("robust", reads=("beta", "label_smoothing", "sft_coef"))
def _robust(answers: AnswerBatch, beta: float, config: Preference) -> Tensor:
    return preference.robust_dpo(answers.margin, beta, config.label_smoothing or 0.0)


@register_preference_loss("ipo", reads=("beta", "sft_coef"))
def _ipo(answers: AnswerBatch, beta: float, config: Preference) -> Tensor:
    return preference.ipo(answers.margin, beta)


@register_preference_loss("ipo_mean", reads=("beta", "sft_coef"), uses_token_means=True)
def _ipo_mean(answers: AnswerBatch, beta: float, config: Preference) -> Tensor:
    means = answers.log_ratio / answers.lengths
    return preference.ipo(chosen(means) - rejected(means), beta)


@register_preference_loss("hinge", reads=("beta", "sft_coef"))
def _hinge(answers: AnswerBatch, beta: float, config: Preference) -> Tensor:
    return preference.hinge(answers.margin, beta)


@register_preference_loss(
    "slic", beta=1.0, reads=("slic_delta", "sft_coef"), needs_reference=False, sft_on_summed_logp=True
)
def _slic(answers: AnswerBatch, beta: float, config: Preference) -> Tensor:
    return preference.slic(chosen(answers.logp), rejected(answers.logp), config.slic_delta)


@register_preference_loss("exo_pair", reads=("beta", "label_smoothing", "sft_coef"))
def _exo_pair(answers: AnswerBatch, beta: float, config: Preference) -> Tensor:
    smoothing = EXO_SMOOTHING if config.label_smoothing is None else config.label_smoothing
    return preference.exo_pair(answers.margin, beta, smoothing)


@register_preference_loss("nca_pair", reads=("beta", "sft_coef"))
def _nca_pair(answers: AnswerBatch, beta: float, config: Preference) -> Tensor:
    return preference.nca_pair(chosen(answers.log_ratio), rejected(answers.log_ratio), beta)


@register_preference_loss("sppo_hard", beta=1e-3, reads=("beta", "sft_coef"))
def _sppo_hard(answers: AnswerBatch, beta: float, config: Preference) -> Tensor:
    return preference.sppo_hard(chosen(answers.log_ratio), rejected(answers.log_ratio), beta)


@register_preference_loss("apo_zero", reads=("beta", "sft_coef"))
def _apo_zero(answers: AnswerBatch, beta: float, config: Preference) -> Tensor:
    return preference.apo_zero(chosen(answers.log_ratio), rejected(answers.log_ratio), beta)


@register_preference_loss("apo_down", reads=("beta", "sft_coef"))
def _apo_down(answers: AnswerBatch, beta: float, config: Preference) -> Tensor:
    return preference.apo_down(chosen(answers.log_ratio), rejected(answers.log_ratio), beta)


@register_preference_loss("kto", reads=("beta", "kto_desirable_weight", "kto_undesirable_weight"), of_pairs=False)
def _kto(answers: AnswerBatch, beta: float, config: Preference) -> Tensor:
    assert answers.kl is not None
    weights = config.kto_desirable_weight, config.kto_undesirable_weight
    return preference.kto(answers.log_ratio, answers.good, answers.kl, beta, *weights)


@register_preference_loss("orpo", reads=("beta",), needs_reference=False, uses_token_means=True)
def _orpo(answers: AnswerBatch, beta: float, config: Preference) -> Tensor:
    return preference.orpo(chosen(answers.mean), rejected(answers.mean), beta)


@register_preference_loss(
    "simpo", beta=2.0, reads=("beta", "simpo_gamma", "sft_coef"), needs_reference=False, uses_token_means=True
)
def _simpo(answers: AnswerBatch, beta: float, config: Preference) -> Tensor:
    return preference.simpo(chosen(answers.mean), rejected(answers.mean), beta, config.simpo_gamma)
