"""What a policy loss is, and where it is registered.

@register_policy_loss("mine")
def mine(inputs: PolicyLossInputs, config: Actor) -> PolicyLossOutput:
    ratio = log_ratio(inputs.logp, inputs.old_logp, inputs.mask).exp()
    return PolicyLossOutput(-ratio * inputs.advantages)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from alphaapollo.algorithms.log_ratio import log_ratio
from alphaapollo.algorithms.masked import masked, row_mean
from alphaapollo.config.schema import Actor
from alphaapollo.utils.registry import Registry

Level = Literal["token", "sequence"]


@dataclass(frozen=True)
class PolicyLossInputs:
    """A micro-batch as losses see it, response-aligned: B rows, L = longest response. Only `logp` has a gradient.

    Where a trajectory has several rows here, they are one, laid end to end without the tokens between actions.
    """

    logp: Tensor  # [B, L] of the policy being trained
    old_logp: Tensor  # [B, L] of the policy that the batch is scored with: the ratio's denominator
    advantages: Tensor  # [B, L]
    mask: Tensor  # [B, L] 1 on action tokens
    rollout_logp: Tensor | None = None  # [B, L] of the engine that sampled
    chosen: Tensor | None = None  # bool [B, L], what the loss's `choose` chose


@dataclass(frozen=True)
class PolicyLossOutput:
    """The loss without its aggregation, to be minimised.

    Metrics are scalars summed over action tokens (token level) or over non-empty rows (sequence level); whoever logs
    them divides by the global count of the same.
    """

    loss: Tensor  # [B, L] at token level, [B] at sequence level; garbage off the mask and in empty rows is ignored
    metrics: dict[str, Tensor] = field(default_factory=dict)


PolicyLossFn = Callable[[PolicyLossInputs, Actor], PolicyLossOutput]
TokenSelector = Callable[[Tensor, Tensor, Actor], Tensor]
"""(log-probs, advantages, config) of the n action tokens of a mini-batch, in random order -> bool [n]. The log-probs
are those of the policy before its first step on the batch."""


@dataclass(frozen=True)
class PolicyLoss:
    """A registered loss. Call it: the shape of the result is checked.

    What goes together is decided from these declarations when a run starts (trainer/setup/combinations.py).
    """

    name: str
    fn: PolicyLossFn
    level: Level = "token"  # token: aggregated by loss_agg_mode; sequence: one number a sequence, mean over them
    on_policy: bool = False  # has no importance ratio: right for one optimiser step an iteration
    reads: tuple[str, ...] | None = None  # fields of Actor that it reads, nested ones dotted; None = unknown
    of_sequence: bool = False  # a token's loss depends on the other tokens of its sequence; always at sequence level
    choose: TokenSelector | None = None  # chooses tokens over the whole mini-batch, for inputs.chosen

    @property
    def needs_full_trajectories(self) -> bool:
        """Whether all rows of a trajectory must stand in one micro-batch: it then sees them as one row."""
        return self.of_sequence or self.level == "sequence"

    def __call__(self, inputs: PolicyLossInputs, config: Actor) -> PolicyLossOutput:
        output = self.fn(inputs, config)
        expected = inputs.mask.shape if self.level == "token" else inputs.mask.shape[:1]
        if output.loss.shape != expected:
            raise ValueError(
                f"policy loss {self.name!r} returned shape {tuple(output.loss.shape)}; at {self.level} level it must "
                f"be {tuple(expected)}."
            )
        return output


_policy_losses: Registry[PolicyLoss] = Registry("policy loss")


def register_policy_loss(
    name: str,
    *,
    level: Level = "token",
    on_policy: bool = False,
    reads: tuple[str, ...] | None = None,
    of_sequence: bool = False,
    choose: TokenSelector | None = None,
) -> Callable[[PolicyLossFn], PolicyLossFn]:
    """Decorator: register `fn(inputs, config.actor_rollout_ref.actor) -> PolicyLossOutput` under
    policy_loss.loss_mode=name.

    The options are the fields of `PolicyLoss`; all are optional. With `reads`, a run tells of keys set in vain.
    """

    def add(fn: PolicyLossFn) -> PolicyLossFn:
        _policy_losses.register(name)(PolicyLoss(name, fn, level, on_policy, reads, of_sequence, choose))
        return fn

    return add


def get_policy_loss(name: str) -> PolicyLoss:
    """The loss of that name. Raises ValueError with the known and the nearest names."""
    return _policy_losses.get(name)


def policy_loss_names() -> list[str]:
    return _policy_losses.names()


def clip_metrics(clipped: Tensor, above: Tensor, mask: Tensor, per_row: bool = False) -> dict[str, Tensor]:
    """How much the clip decided, in all and on each side. `clipped`: bool, or the share of a row; `above`: bool, the
    clip is the upper one. [B, L], or with `per_row` [B]."""
    total = row_sum if per_row else token_sum
    nowhere = torch.zeros_like(clipped)
    return {
        "clip_fraction": total(clipped, mask),
        "clip_fraction_low": total(torch.where(above, nowhere, clipped), mask),
        "clip_fraction_high": total(torch.where(above, clipped, nowhere), mask),
    }


CLIP = ("clip_ratio", "clip_ratio_low", "clip_ratio_high")
"""The fields that a loss reads for its clip range."""


def clip_range(config: Actor, low: float, high: float) -> tuple[float, float]:
    """(below, above) of the clip: clip_ratio_low/high, else clip_ratio for both, else the loss's own."""
    return (
        _first_set(config.clip_ratio_low, config.clip_ratio, low),
        _first_set(config.clip_ratio_high, config.clip_ratio, high),
    )


def _first_set(first: float | None, second: float | None, default: float) -> float:
    if first is not None:
        return first
    return default if second is None else second


def token_sum(values: Tensor, mask: Tensor) -> Tensor:
    """A metric: summed over action tokens, without gradient. [B, L] numbers or bools -> float64 scalar."""
    return masked(values.detach().double(), mask).sum()


def row_sum(values: Tensor, mask: Tensor) -> Tensor:
    """A metric: summed over non-empty rows, without gradient. [B] numbers or bools -> float64 scalar."""
    return masked(values.detach().double(), mask.bool().any(dim=1)).sum()


def old_policy_kl(inputs: PolicyLossInputs, per_row: bool = False) -> Tensor:
    """How far the update has moved: the k3 estimate of KL(old||pi) on the old policy's samples, summed as a metric
    over tokens, or over rows of token means."""
    d = log_ratio(inputs.logp.detach(), inputs.old_logp, inputs.mask)
    kl = torch.expm1(d) - d
    return row_sum(row_mean(kl, inputs.mask), inputs.mask) if per_row else token_sum(kl, inputs.mask)
