"""Preference losses (DPO, IPO, KTO, ...), their registry, and the loss of reward models.

@register_preference_loss("mine", reads=("beta",))
def mine(answers: AnswerBatch, beta: float, config: Preference) -> Tensor:
    return -logsigmoid(beta * answers.margin)

The log-ratio of an answer is log pi - log ref, and beta times the log-ratio is its implicit reward. The margin of a
pair is the log-ratio of the chosen answer minus that of the rejected answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from alphaapollo.algorithms.user_functions import (
    FunctionRegistry,
    check_finite_gradient,
    check_float_tensor,
    explain_user_errors,
)
from alphaapollo.config.schema import Preference

EXO_SMOOTHING = 1e-3  # default of label_smoothing in arXiv 2402.00856


@dataclass(frozen=True)
class AnswerBatch:
    """Inputs of a preference loss: the R answers of a micro-batch. Only `logp` has a gradient.

    In pairs, chosen answers have even indices, and each rejected answer follows its chosen answer.
    """

    logp: Tensor  # [R] log-prob of the answer, summed over its tokens
    lengths: Tensor  # [R] number of tokens of the answer, at least 1
    is_desirable: Tensor  # bool [R]: the answer is chosen, or labelled desirable
    ref_logp: Tensor | None = None  # [R] reference log-probs, if the loss needs them
    kl: Tensor | None = None  # scalar: KL estimate over the mini-batch, if the loss needs it

    @property
    def log_ratio(self) -> Tensor:
        """Log-ratio log pi - log ref of each answer. [R]"""
        assert self.ref_logp is not None, "the loss was declared without a reference"
        return self.logp - self.ref_logp

    @property
    def mean_logp(self) -> Tensor:
        """Mean log-prob per token. [R]"""
        return self.logp / self.lengths

    @property
    def margin(self) -> Tensor:
        """Margin of each pair: log-ratio of the chosen minus log-ratio of the rejected answer. [P]"""
        return chosen(self.log_ratio) - rejected(self.log_ratio)


def chosen(values: Tensor) -> Tensor:
    """Select the values of the chosen answers, at the even indices. [R answers] -> [P pairs]."""
    return values[0::2]


def rejected(values: Tensor) -> Tensor:
    """Select the values of the rejected answers, at the odd indices. [R answers] -> [P pairs]."""
    return values[1::2]


LossFn = Callable[[AnswerBatch, float, Preference], Tensor]


class PreferenceLossOutput(NamedTuple):
    """Losses and metrics of P pairs or R single answers."""

    losses: Tensor  # [P] or [R]
    is_correct: Tensor
    """Bool [P]: the chosen answer has the higher implicit reward. Or [R]: the implicit reward agrees with the label."""
    metric_sums: dict[str, Tensor]  # sums over losses, and over the chosen and the rejected answers


@dataclass(frozen=True)
class PreferenceLoss:
    """Registered preference loss. Calling it runs `fn`, checks the result, adds the SFT term and computes metrics.

    `fn(answers, beta, config.preference)` returns one loss per pair [P], or per answer [R] if not is_pairwise.
    """

    name: str
    fn: LossFn
    beta: float = 0.1  # used if preference.beta is null
    reads: tuple[str, ...] = ("beta",)  # keys of the config section `preference` that have an effect
    needs_reference: bool = True
    uses_token_means: bool = False  # compares mean log-probs per token, in the loss and in the implicit rewards
    is_pairwise: bool = True  # False: compares single answers with labels, and needs answers.kl
    sft_on_summed_logp: bool = False  # the SFT term is the summed log-prob of the chosen answer, not the mean

    def __str__(self) -> str:
        return f"the preference loss {self.name!r}"

    def __call__(self, answers: AnswerBatch, config: Preference) -> PreferenceLossOutput:
        beta = self.beta if config.beta is None else config.beta
        with explain_user_errors(self.fn, str(self)):
            losses = self.fn(answers, beta, config)
            num_examples = len(answers.logp) // 2 if self.is_pairwise else len(answers.logp)
            check_float_tensor("the result", losses, (num_examples,))
            if answers.logp.requires_grad and not losses.requires_grad:
                raise ValueError("the loss has no gradient, because it does not depend on answers.logp")
        if config.sft_coef and "sft_coef" in self.reads:
            losses = losses - config.sft_coef * chosen(answers.logp if self.sft_on_summed_logp else answers.mean_logp)
        with torch.no_grad():
            values = answers.log_ratio if self.needs_reference else answers.logp
            rewards = beta * (values / answers.lengths if self.uses_token_means else values)  # implicit rewards [R]
            if self.is_pairwise:
                is_correct = chosen(rewards) > rejected(rewards)
            else:
                assert answers.kl is not None
                is_correct = (rewards > beta * answers.kl.clamp(min=0.0)) == answers.is_desirable
            is_chosen, is_rejected = answers.is_desirable, ~answers.is_desirable
            metric_sums = {
                "loss": losses.sum(),
                "chosen": is_chosen.sum(),
                "rejected": is_rejected.sum(),
                "reward_chosen": _sum_where(is_chosen, rewards),
                "reward_rejected": _sum_where(is_rejected, rewards),
                "logp_chosen": _sum_where(is_chosen, answers.logp),
                "logp_rejected": _sum_where(is_rejected, answers.logp),
            }
        return PreferenceLossOutput(losses, is_correct, metric_sums)

    def try_on_toy_answers(self, config: Preference) -> None:
        """Call the loss on two pairs or four answers. Raises ValueError for invalid keys or a faulty function."""
        logp = torch.tensor([-2.0, -3.0, -4.0, -2.5], requires_grad=True)
        is_desirable = torch.tensor([True, False, True, False])
        reference = logp.detach() - 0.1 if self.needs_reference else None
        answers = AnswerBatch(logp, torch.tensor([2, 3, 2, 1]), is_desirable, reference, kl=torch.tensor(0.1))
        losses = self(answers, config).losses
        with explain_user_errors(self.fn, str(self)):
            check_finite_gradient(losses.sum(), logp)


def _sum_where(selected: Tensor, values: Tensor) -> Tensor:
    """Sum the selected values. Unlike a boolean index, this does not wait for the GPU."""
    return torch.where(selected, values, 0.0).sum()


def compute_preference_metrics(metric_sums: Mapping[str, float]) -> dict[str, float]:
    """Compute metrics from `PreferenceLossOutput.metric_sums`, added up over all micro-batches and ranks.

    metric_sums["examples"]: number of pairs, or of single answers that are compared with their labels.
    """
    metrics = {"loss": metric_sums["loss"] / metric_sums["examples"]}
    for side in ("chosen", "rejected"):
        if metric_sums[side]:
            metrics |= {name: metric_sums[name] / metric_sums[side] for name in (f"reward_{side}", f"logp_{side}")}
    if metric_sums["chosen"] and metric_sums["rejected"]:
        metrics["margin"] = metrics["reward_chosen"] - metrics["reward_rejected"]
    if "kl" in metric_sums:
        metrics["kl"] = max(0.0, metric_sums["kl"] / metric_sums["examples"])
    return metrics


_losses = FunctionRegistry("preference loss", "preference_losses", PreferenceLoss, Preference)
get_preference_loss, preference_loss_names = _losses.get, _losses.names
register_preference_loss = _losses.declare
"""Decorator that registers a loss, selected by preference.loss=name; see FunctionRegistry.declare."""


@register_preference_loss("sigmoid", reads=("beta", "label_smoothing", "sft_coef"))
def dpo(answers: AnswerBatch, beta: float, config: Preference) -> Tensor:
    """DPO: -(1-e) logsigmoid(beta margin) - e logsigmoid(-beta margin), e = label_smoothing (arXiv 2305.18290)."""
    z, smoothing = beta * answers.margin, config.label_smoothing or 0.0
    return -(1.0 - smoothing) * logsigmoid(z) - smoothing * logsigmoid(-z)


@register_preference_loss("robust", reads=("beta", "label_smoothing", "sft_coef"))
def robust_dpo(answers: AnswerBatch, beta: float, config: Preference) -> Tensor:
    """Robust DPO for labels that are flipped with probability label_smoothing = e < 1/2 (arXiv 2403.00409).

    [-(1-e) logsigmoid(beta margin) + e logsigmoid(-beta margin)] / (1 - 2e)
    """
    z, smoothing = beta * answers.margin, config.label_smoothing or 0.0
    if smoothing >= 0.5:
        raise ValueError(
            f"label_smoothing={smoothing} must be below 0.5 for robust DPO. Lower preference.label_smoothing."
        )
    return (-(1.0 - smoothing) * logsigmoid(z) + smoothing * logsigmoid(-z)) / (1.0 - 2.0 * smoothing)


@register_preference_loss("ipo", reads=("beta", "sft_coef"))
def ipo(answers: AnswerBatch, beta: float, config: Preference) -> Tensor:
    """IPO: (answers.margin - 1/(2 beta))^2, from log-ratios summed over tokens (arXiv 2310.12036, Eq. 17)."""
    return (answers.margin - 1.0 / (2.0 * beta)) ** 2


@register_preference_loss("ipo_mean", reads=("beta", "sft_coef"), uses_token_means=True)
def ipo_mean(answers: AnswerBatch, beta: float, config: Preference) -> Tensor:
    """IPO with mean log-ratios r per token: (r(chosen) - r(rejected) - 1/(2 beta))^2."""
    means = answers.log_ratio / answers.lengths
    return (chosen(means) - rejected(means) - 1.0 / (2.0 * beta)) ** 2


@register_preference_loss("hinge", reads=("beta", "sft_coef"))
def hinge(answers: AnswerBatch, beta: float, config: Preference) -> Tensor:
    """RSO's hinge loss max(0, 1 - beta margin) (arXiv 2309.06657)."""
    return torch.relu(1.0 - beta * answers.margin)


@register_preference_loss(
    "slic", beta=1.0, reads=("slic_delta", "sft_coef"), needs_reference=False, sft_on_summed_logp=True
)
def slic(answers: AnswerBatch, beta: float, config: Preference) -> Tensor:
    """Calibration loss of SLiC-HF: max(0, slic_delta - (logp of chosen - logp of rejected)) (arXiv 2305.10425).

    preference.sft_coef is the coefficient of the paper's supervised term.
    """
    return torch.relu(config.slic_delta - (chosen(answers.logp) - rejected(answers.logp)))


@register_preference_loss("exo_pair", reads=("beta", "label_smoothing", "sft_coef"))
def exo_pair(answers: AnswerBatch, beta: float, config: Preference) -> Tensor:
    """EXO: KL from the policy's preference probability p to the label 1-e (arXiv 2402.00856).

    p log(p/(1-e)) + (1-p) log((1-p)/e) with p = sigmoid(beta margin) and label_smoothing e in (0, 1).
    """
    smoothing = EXO_SMOOTHING if config.label_smoothing is None else config.label_smoothing
    if not 0.0 < smoothing < 1.0:
        raise ValueError(
            f"label_smoothing={smoothing} must be above 0 and below 1 for EXO. Set preference.label_smoothing=1e-3."
        )
    z = beta * answers.margin
    losses = z.sigmoid() * (logsigmoid(z) - math.log(1.0 - smoothing))
    return losses + (-z).sigmoid() * (logsigmoid(-z) - math.log(smoothing))


@register_preference_loss("nca_pair", reads=("beta", "sft_coef"))
def nca_pair(answers: AnswerBatch, beta: float, config: Preference) -> Tensor:
    """NCA, for log-ratios u of the chosen and v of the rejected answer (arXiv 2402.05369).

    -logsigmoid(beta u) - [logsigmoid(-beta u) + logsigmoid(-beta v)] / 2
    """
    u, v = chosen(answers.log_ratio), rejected(answers.log_ratio)
    return -logsigmoid(beta * u) - 0.5 * logsigmoid(-beta * u) - 0.5 * logsigmoid(-beta * v)


@register_preference_loss("sppo_hard", beta=1e-3, reads=("beta", "sft_coef"))
def sppo_hard(answers: AnswerBatch, beta: float, config: Preference) -> Tensor:
    """SPPO: (u - 1/(2 beta))^2 + (v + 1/(2 beta))^2 for log-ratios u (chosen), v (rejected) (arXiv 2405.00675)."""
    u, v = chosen(answers.log_ratio), rejected(answers.log_ratio)
    return (u - 0.5 / beta) ** 2 + (v + 0.5 / beta) ** 2


@register_preference_loss("apo_zero", reads=("beta", "sft_coef"))
def apo_zero(answers: AnswerBatch, beta: float, config: Preference) -> Tensor:
    """APO-zero: 1 - sigmoid(beta u) + sigmoid(beta v), log-ratios u (chosen), v (rejected) (arXiv 2408.06266)."""
    return (-beta * chosen(answers.log_ratio)).sigmoid() + (beta * rejected(answers.log_ratio)).sigmoid()


@register_preference_loss("apo_down", reads=("beta", "sft_coef"))
def apo_down(answers: AnswerBatch, beta: float, config: Preference) -> Tensor:
    """APO-down: sigmoid(beta u) + 1 - sigmoid(beta (u - v)), log-ratios u (chosen), v (rejected) (arXiv 2408.06266)."""
    u, v = chosen(answers.log_ratio), rejected(answers.log_ratio)
    return (beta * u).sigmoid() + (-beta * (u - v)).sigmoid()


@register_preference_loss("kto", reads=("beta", "kto_desirable_weight", "kto_undesirable_weight"), is_pairwise=False)
def kto(answers: AnswerBatch, beta: float, config: Preference) -> Tensor:
    """KTO, for single answers with a binary label and log-ratio u (arXiv 2402.01306, Eq. 8).

    weight * sigmoid(-beta (u - z0)) for desirable answers, weight * sigmoid(beta (u - z0)) for undesirable answers.
    z0 is an estimate of KL(pi||ref) over the batch, at least 0 and without gradient.
    """
    assert answers.kl is not None
    z = beta * (answers.log_ratio - answers.kl.detach().clamp(min=0.0))
    loss_if_desirable = config.kto_desirable_weight * (-z).sigmoid()
    return torch.where(answers.is_desirable, loss_if_desirable, config.kto_undesirable_weight * z.sigmoid())


@register_preference_loss("orpo", needs_reference=False, uses_token_means=True)
def orpo(answers: AnswerBatch, beta: float, config: Preference) -> Tensor:
    """ORPO, without a reference: -log p_w - beta logsigmoid(log odds_w - log odds_l) (arXiv 2403.07691, Eq. 6-7).

    log p is the *mean* log-prob per token of the chosen (w) or rejected (l) answer, and odds = p / (1 - p).
    """
    logp_w, logp_l = chosen(answers.mean_logp), rejected(answers.mean_logp)
    log_odds_ratio = logp_w - _log1mexp(logp_w) - (logp_l - _log1mexp(logp_l))
    return -logp_w - beta * logsigmoid(log_odds_ratio)


@register_preference_loss(
    "simpo", beta=2.0, reads=("beta", "simpo_gamma", "sft_coef"), needs_reference=False, uses_token_means=True
)
def simpo(answers: AnswerBatch, beta: float, config: Preference) -> Tensor:
    """SimPO: -logsigmoid(beta (m(chosen) - m(rejected)) - simpo_gamma), m: mean log-prob (arXiv 2405.14734, Eq. 6)."""
    return -logsigmoid(beta * (chosen(answers.mean_logp) - rejected(answers.mean_logp)) - config.simpo_gamma)


def _log1mexp(logp: Tensor) -> Tensor:
    """Compute log(1 - exp(logp)) for logp < 0, without cancellation. Any shape."""
    return torch.where(logp > -math.log(2.0), torch.log(-torch.expm1(logp)), torch.log1p(-torch.exp(logp)))


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor, centring: float = 0.0) -> Tensor:
    """Compute a reward model's loss -logsigmoid(chosen - rejected - margin) + centring (chosen + rejected)^2.

    The first term (arXiv 2204.05862) only constrains differences of scores. The second keeps scores near zero (arXiv
    2312.09244, with centring=0.01).

    Args:
        chosen, rejected: [P] scores of the chosen and the rejected answer of each pair.
        margin: [P] difference that the scores should have, at least 0 (arXiv 2307.09288, Eq. 2).
    """
    return -logsigmoid(chosen - rejected - margin) + centring * (chosen + rejected) ** 2
