"""Policy losses: inputs, outputs and registry.

@register_policy_loss("mine")
def mine(inputs: PolicyLossInputs, config: Actor) -> PolicyLossOutput:
    return PolicyLossOutput(-inputs.log_ratio.exp() * inputs.advantages)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from alphaapollo.algorithms.statistics import apply_mask, log_ratio, row_mean
from alphaapollo.algorithms.user_functions import FunctionRegistry, check_float_tensor, check_type, explain_user_errors
from alphaapollo.config.schema import Actor

Level = Literal["token", "sequence"]
Anchor = Literal["old", "rollout"]


@dataclass(frozen=True)
class PolicyLossInputs:
    """Inputs of a policy loss for a micro-batch of B trajectories. Only `logp` has a gradient.

    Column 0 is the first response token. If a trajectory has several token sequences, their action tokens are joined.
    """

    logp: Tensor  # [B, L] log-probs of the trained policy
    old_logp: Tensor  # [B, L] log-probs of the policy before the first step on the batch: denominator of the ratio.
    # With rollout_correction.bypass or PolicyLoss.anchor="rollout", those of the rollout engine.
    advantages: Tensor  # [B, L]
    mask: Tensor  # [B, L] 1 on action tokens
    rollout_logp: Tensor | None = None  # [B, L] log-probs of the rollout engine
    selected_tokens: Tensor | None = None  # bool [B, L], tokens selected by PolicyLoss.select_tokens
    kl_coef: float | None = None  # coefficient of ppo_kl; None: policy_loss.ppo_kl_coef

    @property
    def log_ratio(self) -> Tensor:
        """Log-ratio of policy and old policy at each token, clamped; 0 outside the mask. [B, L]"""
        return log_ratio(self.logp, self.old_logp, self.mask)


@dataclass(frozen=True)
class PolicyLossOutput:
    """Loss and penalty of each token or sequence, before aggregation to a scalar, and metrics.

    A metric is a scalar: the sum over action tokens (token level) or non-empty rows (sequence level). The logger
    divides it by the number of tokens or rows in all micro-batches and ranks. Each call returns the same names; a name
    that ends in _max is a maximum.
    """

    loss: Tensor  # [B, L] at token level, [B] at sequence level; values outside the mask and in empty rows are ignored
    metrics: dict[str, Tensor] = field(default_factory=dict)
    penalty: Tensor | float = 0.0  # shape of `loss`; added to `loss`, but not weighted or masked by rollout_correction


PolicyLossFn = Callable[[PolicyLossInputs, Actor], PolicyLossOutput]
OTHER_METRICS = frozenset(
    {"loss", "pg_loss", "ratio_max", "tokens", "rows", "entropy", "ref_kl", "old_policy_kl", "lr", "grad_norm"}
    | {"grad_norm_max", "grad_clipped", "steps_skipped", "correction_weight", "correction_dropped", "off_policy_masked"}
)
"""Names that other parts of an update log beside the metrics of a loss."""

TokenSelector = Callable[[Tensor, Tensor, Actor], Tensor]
"""Function (log-probs [n], advantages [n], config) -> bool [n] that selects some of a mini-batch's n action tokens.

The tokens are in random order. The log-probs are those of the policy before its first step on the batch.
"""


@dataclass(frozen=True)
class PolicyLoss:
    """Registered policy loss. Calling it runs `fn`, checks the result and adds the metric old_policy_kl.

    The other fields declare what `fn` needs and supports (checked by trainer/setup/combinations.py).
    """

    name: str
    fn: PolicyLossFn
    level: Level = "token"  # token: aggregated by loss_agg_mode; sequence: one value per sequence, averaged
    on_policy: bool = False  # has no importance ratio, so only one optimizer step per iteration is valid
    reads: tuple[str, ...] | None = None  # fields of Actor that `fn` reads, nested ones with dots; None = unknown
    is_surrogate: bool = False  # the loss of a token is -(importance ratio * advantage), which TRPO needs
    zero_without_advantage: bool = False  # tokens with advantage 0 have no gradient; rows of such tokens are skipped
    needs_full_sequence: bool = False
    """The loss of a token depends on other tokens of its sequence, so all rows of a trajectory are in one micro-batch
    and joined into one row; implied by level=sequence."""
    anchor: Anchor = "old"
    """rollout: a run passes the rollout engine's log-probs as inputs.old_logp, so that the ratio includes staleness and
    the log-prob mismatch. Then no log-probs are recomputed, and rollout_correction.method is rejected."""
    select_tokens: TokenSelector | None = None  # selects tokens of a mini-batch for inputs.selected_tokens

    def __post_init__(self) -> None:
        object.__setattr__(self, "needs_full_sequence", self.needs_full_sequence or self.level == "sequence")

    def __str__(self) -> str:
        return f"the policy loss {self.name!r}"

    def __call__(self, inputs: PolicyLossInputs, config: Actor) -> PolicyLossOutput:
        per_row = self.level == "sequence"
        with explain_user_errors(self.fn, str(self)):
            output = self.fn(inputs, config)
            check_type(output, PolicyLossOutput)
            shape = inputs.mask.shape[:1] if per_row else inputs.mask.shape
            check_float_tensor(f"the loss (level={self.level})", output.loss + output.penalty, shape)
            for name, value in output.metrics.items():
                check_float_tensor(f"the metric {name!r}", value, ())
                if name in OTHER_METRICS or not isinstance(name, str):
                    raise ValueError(f"a metric cannot have the name {name!r}. Choose another string")
            if inputs.logp.requires_grad and not output.loss.requires_grad:
                raise ValueError("the loss has no gradient, because it does not depend on inputs.logp")
        return replace(output, metrics=output.metrics | {"old_policy_kl": old_policy_kl(inputs, per_row)})

    def choose_tokens(self, logp: Tensor, advantages: Tensor, config: Actor) -> Tensor:
        """Select tokens of a mini-batch with `select_tokens`, which must be set. Returns bool [n]."""
        assert self.select_tokens is not None
        with explain_user_errors(self.select_tokens, f"select_tokens of {self}"):
            chosen = self.select_tokens(logp, advantages, config)
            check_type(chosen, Tensor)
            if chosen.dtype != torch.bool or chosen.shape != logp.shape:
                raise ValueError(f"it must return bool {list(logp.shape)}, not {chosen.dtype} {list(chosen.shape)}")
        return chosen


_policy_losses = FunctionRegistry("policy loss", "losses", PolicyLoss, Actor)
get_policy_loss, policy_loss_names = _policy_losses.get, _policy_losses.names
register_policy_loss = _policy_losses.declare
"""Decorator that registers a loss, selected by policy_loss.loss_mode=name; see FunctionRegistry.declare."""


def compute_clip_metrics(clipped: Tensor, is_upper_bound: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Compute the clip fraction, also separately for the lower and the upper bound, as sums over tokens or rows.

    Args:
        clipped: bool [B, L]; for a sequence-level loss [B], bool or the share of clipped tokens in the row.
        is_upper_bound: bool, same shape: True where the upper bound applies, False where the lower bound applies.
        mask: [B, L].
    """
    sum_masked = row_sum if clipped.ndim == 1 else token_sum
    zeros = torch.zeros_like(clipped)
    return {
        "pg_clipfrac": sum_masked(clipped, mask),
        "clip_fraction_low": sum_masked(torch.where(is_upper_bound, zeros, clipped), mask),
        "clip_fraction_high": sum_masked(torch.where(is_upper_bound, clipped, zeros), mask),
    }


CLIP = ("clip_ratio", "clip_ratio_low", "clip_ratio_high")
"""Fields of Actor that clip_range reads."""


def clip_range(config: Actor, default_low: float, default_high: float) -> tuple[float, float]:
    """Return the clip radii below and above 1: clip_ratio_low and _high, else clip_ratio, else the given defaults."""
    if config.clip_ratio is not None:
        default_low = default_high = config.clip_ratio
    low = default_low if config.clip_ratio_low is None else config.clip_ratio_low
    high = default_high if config.clip_ratio_high is None else config.clip_ratio_high
    return low, high


def token_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum values over the tokens in the mask, without gradient. [B, L] numbers or bools -> float64 scalar."""
    return apply_mask(values.detach().double(), mask).sum()


def row_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum values over rows with at least one token in the mask, without gradient. [B] -> float64 scalar."""
    return apply_mask(values.detach().double(), mask.bool().any(dim=1)).sum()


def old_policy_kl(inputs: PolicyLossInputs, per_row: bool) -> Tensor:
    """Compute the metric old_policy_kl: k3 estimates of KL(old||pi), summed over tokens.

    With per_row, it is the sum over rows of the mean over the row's tokens.
    """
    d = log_ratio(inputs.logp.detach(), inputs.old_logp, inputs.mask)
    kl = torch.expm1(d) - d
    return row_sum(row_mean(kl, inputs.mask), inputs.mask) if per_row else token_sum(kl, inputs.mask)
