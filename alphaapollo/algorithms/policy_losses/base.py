"""Policy losses: inputs, outputs and registry.

@register_policy_loss("mine")
def mine(inputs: PolicyLossInputs, config: Actor) -> PolicyLossOutput:
    ratio = log_ratio(inputs.logp, inputs.old_logp, inputs.mask).exp()
    return PolicyLossOutput(-ratio * inputs.advantages)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from alphaapollo.algorithms.masked import apply_mask, log_ratio, row_mean
from alphaapollo.algorithms.result_checks import check_floats, check_type
from alphaapollo.config.schema import Actor
from alphaapollo.utils.registry import Registry

Level = Literal["token", "sequence"]
L = TypeVar("L")


@dataclass(frozen=True)
class PolicyLossInputs:
    """Inputs of a policy loss, response-aligned: B rows, L = longest response. Only `logp` has a gradient.

    If a trajectory has several rows in the micro-batch, they are joined into one, without the tokens between actions.
    """

    logp: Tensor  # [B, L] of the trained policy
    old_logp: Tensor  # [B, L] of the policy before the first step on the batch: the ratio's denominator
    advantages: Tensor  # [B, L]
    mask: Tensor  # [B, L] 1 on action tokens
    rollout_logp: Tensor | None = None  # [B, L] of the rollout engine
    chosen: Tensor | None = None  # bool [B, L], tokens selected by the loss's `choose`


@dataclass(frozen=True)
class PolicyLossOutput:
    """Loss to minimize, before aggregation.

    Metrics are scalars summed over action tokens (token level) or non-empty rows (sequence level). The logger divides
    them by the global count. Every registered loss also gets `old_policy_kl`.
    """

    loss: Tensor  # [B, L] at token level, [B] at sequence level; values off the mask and in empty rows are ignored
    metrics: dict[str, Tensor] = field(default_factory=dict)


PolicyLossFn = Callable[[PolicyLossInputs, Actor], PolicyLossOutput]
TokenSelector = Callable[[Tensor, Tensor, Actor], Tensor]
"""(log-probs, advantages, config) of the n action tokens of a mini-batch, in random order -> bool [n]. The log-probs
are those of the policy before its first step on the batch."""


@dataclass(frozen=True)
class PolicyLoss:
    """A registered loss. Calling it checks the shape of the result and adds the metric old_policy_kl.

    trainer/setup/combinations.py uses these declarations to reject invalid combinations when a run starts.
    """

    name: str
    fn: PolicyLossFn
    level: Level = "token"  # token: aggregated by loss_agg_mode; sequence: one value per sequence, averaged
    on_policy: bool = False  # has no importance ratio: valid for one optimizer step per iteration
    reads: tuple[str, ...] | None = None  # fields of Actor that it reads, nested ones dotted; None = unknown
    needs_full_sequence: bool = (
        False  # a token's loss depends on the other tokens of its sequence; always at sequence level
    )
    choose: TokenSelector | None = None  # selects tokens over the whole mini-batch, for inputs.chosen

    @property
    def needs_full_trajectories(self) -> bool:
        """Whether all rows of a trajectory must be in one micro-batch, where they are joined into one row."""
        return self.needs_full_sequence or self.level == "sequence"

    def __str__(self) -> str:
        return f"the policy loss {self.name!r}"

    def __call__(self, inputs: PolicyLossInputs, config: Actor) -> PolicyLossOutput:
        per_row = self.level == "sequence"
        output = self.fn(inputs, config)
        check_type(str(self), output, PolicyLossOutput)
        shape = inputs.mask.shape[:1] if per_row else inputs.mask.shape
        check_floats(f"the loss of {self} (level={self.level})", output.loss, shape)
        return PolicyLossOutput(output.loss, output.metrics | {"old_policy_kl": old_policy_kl(inputs, per_row)})


_policy_losses: Registry[PolicyLoss] = Registry("policy loss")
get_policy_loss = _policy_losses.get
policy_loss_names = _policy_losses.names


def register_policy_loss(name: str, **declarations: Any) -> Callable[[PolicyLossFn], PolicyLossFn]:
    """Decorator: register `fn(inputs, config.actor_rollout_ref.actor) -> PolicyLossOutput` under
    policy_loss.loss_mode=name.

    `declarations`: fields of `PolicyLoss`, all optional. With `reads`, a run warns about keys without effect.
    """

    def add(fn: PolicyLossFn) -> PolicyLossFn:
        _policy_losses.register(name)(PolicyLoss(name, fn, **declarations))
        return fn

    return add


def clip_metrics(clipped: Tensor, above: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Clip fractions, in total and per bound. `clipped`: bool, or the fraction of a row; `above`: bool, whether the
    upper bound applies. [B, L], or [B] for a sequence-level loss."""
    total = row_sum if clipped.ndim == 1 else token_sum
    zeros = torch.zeros_like(clipped)
    return {
        "pg_clipfrac": total(clipped, mask),
        "clip_fraction_low": total(torch.where(above, zeros, clipped), mask),
        "clip_fraction_high": total(torch.where(above, clipped, zeros), mask),
    }


CLIP = ("clip_ratio", "clip_ratio_low", "clip_ratio_high")
"""The fields that a loss reads for its clip range."""


def clip_range(config: Actor, low: L, high: float) -> tuple[float | L, float]:
    """(below, above) of the clip: clip_ratio_low/high, else clip_ratio for both, else the loss's own."""
    return (
        _first_not_none(config.clip_ratio_low, config.clip_ratio, low),
        _first_not_none(config.clip_ratio_high, config.clip_ratio, high),
    )


def _first_not_none(first: float | None, second: float | None, default: L) -> float | L:
    if first is not None:
        return first
    return default if second is None else second


def token_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum a metric over action tokens, without gradient. [B, L] numbers or bools -> float64 scalar."""
    return apply_mask(values.detach().double(), mask).sum()


def row_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum a metric over non-empty rows, without gradient. [B] numbers or bools -> float64 scalar."""
    return apply_mask(values.detach().double(), mask.bool().any(dim=1)).sum()


def old_policy_kl(inputs: PolicyLossInputs, per_row: bool) -> Tensor:
    """k3 estimate of KL(old||pi) on the old policy's samples, summed as a metric over tokens, or over rows of token
    means."""
    d = log_ratio(inputs.logp.detach(), inputs.old_logp, inputs.mask)
    kl = torch.expm1(d) - d
    return row_sum(row_mean(kl, inputs.mask), inputs.mask) if per_row else token_sum(kl, inputs.mask)
