"""Shared helpers of the golden functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from alphaapollo.algorithms.aggregation import aggregate_token_losses as weighted_sum
from alphaapollo.algorithms.aggregation import row_weights
from alphaapollo.algorithms.statistics import Groups, apply_mask, masked_mean, move_rewards_to_actions
from alphaapollo.config.schema import AggregationMode
from alphaapollo.models.lm_head import DivergenceTarget, LmHead, LmHeadInput, TokenStats, compute_token_stats

Results = dict[str, Any]
Function = Callable[..., Results]
OffMask = Literal["drop", "fold"]
Count = Literal["all", "nonempty"]


def golden_functions(module: ModuleType) -> dict[str, Function]:
    """Public functions of a module that return Results, by name."""
    functions = inspect.getmembers(module, lambda one: inspect.isfunction(one) and one.__module__ == module.__name__)
    return {name: one for name, one in functions if one.__annotations__["return"] == "Results" and name[0] != "_"}


def clamped(values: Tensor, limit: float | None) -> Tensor:
    return values if limit is None else values.clamp(-limit, limit)


def log_ratio(logp: Tensor, old_logp: Tensor, mask: Tensor, clamp: float | None = None) -> Tensor:
    """Log-ratio without the project's clamp at MAX_LOG_RATIO."""
    return clamped(apply_mask(logp - old_logp, mask), clamp)


def head_input(logits: Tensor) -> LmHeadInput:
    """Input of an output head with an identity as weights: the logits are its hidden states. [..., V] -> [n, V]"""
    size = logits.shape[-1]
    return LmHeadInput(logits.reshape(-1, size), LmHead(torch.eye(size, dtype=logits.dtype)))


def head_stats(logits: Tensor, target: DivergenceTarget | None = None, needs_entropy: bool = False) -> TokenStats:
    """Statistics from the trainer's output head. [..., V] -> flat [n]"""
    tokens = torch.zeros(logits[..., 0].numel(), dtype=torch.int64)
    return compute_token_stats(head_input(logits), tokens, 1.0, needs_entropy=needs_entropy, divergence_target=target)


def head_divergence(logits: Tensor, target: DivergenceTarget) -> Tensor:
    """Divergences of all positions. [..., V] -> [...]"""
    divergence = head_stats(logits, target).divergence
    assert divergence is not None
    return divergence.view(logits.shape[:-1])


class UnsupportedError(Exception):
    """A vectors file uses an unknown function, parameter or choice."""


def check_arguments(function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Raise UnsupportedError if the function does not have a parameter, or its Literal type does not have a choice."""
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise UnsupportedError(str(error)) from error
    hints = get_type_hints(function)
    for name, value in arguments.items():
        hint = hints.get(name)
        if get_origin(hint) is Literal and value not in get_args(hint):
            raise UnsupportedError(f"{name}={value!r}; known: {', '.join(map(str, get_args(hint)))}")


def group_ids(index: Sequence[Any]) -> Tensor:
    """Convert group names of any type to integers."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(index))}
    return torch.tensor([numbers[name] for name in index])


def groups_of(index: Sequence[Any]) -> Groups:
    return Groups.from_ids(group_ids(index))


def on_tokens(values: Tensor, mask: Tensor) -> Tensor:
    return apply_mask(values.unsqueeze(1).expand_as(mask), mask)


def off_mask_rewards(token_rewards: Tensor, mask: Tensor, offmask: OffMask) -> Tensor:
    return move_rewards_to_actions(token_rewards, mask) if offmask == "fold" else apply_mask(token_rewards, mask)


def token_weights(
    mask: Tensor,
    mode: AggregationMode,
    index: Sequence[Any] | None = None,
    horizon: float | None = None,
    count: Count = "nonempty",
    global_tokens: float | None = None,
    global_seqs: float | None = None,
    global_groups: float | None = None,
    dp_size: int = 1,
) -> Tensor:
    """Row weights, rescaled from the counts of this rank to global counts, so that the *mean* over ranks is the loss.
    [B]"""
    lengths = mask.sum(dim=1)
    ids = torch.zeros(len(mask), dtype=torch.int64) if index is None else group_ids(index)
    weights = counted_weights(lengths, ids, mode, mask.shape[1] if horizon is None else horizon, count) * dp_size
    if mode == "token-mean" and global_tokens is not None:
        return weights * float(lengths.sum().clamp(min=1)) / global_tokens
    if mode.startswith("seq-mean") and global_seqs is not None:
        return weights * num_counted(lengths, count) / global_seqs
    if mode.startswith("group-mean") and global_groups is not None:
        return weights * num_counted(Groups.from_ids(ids).sum(lengths), count) / global_groups
    return weights


def counted_weights(lengths: Tensor, ids: Tensor, mode: AggregationMode, horizon: float, count: Count) -> Tensor:
    """Row weights; with `nonempty`, which the project does not offer, empty sequences are not counted in means."""
    counted = lengths >= 0 if count == "all" else lengths > 0
    weights = torch.zeros(lengths.shape, dtype=torch.float64)
    weights[counted] = row_weights(lengths[counted], ids[counted], mode, horizon)
    return weights


def num_counted(lengths: Tensor, count: Count) -> int:
    return max(1, lengths.numel() if count == "all" else int((lengths > 0).sum()))


@dataclass(frozen=True)
class Aggregation:
    """How a loss per token becomes a number: the parameters `agg`, `agg_kw`, and the one that `weights_name` names."""

    mode: AggregationMode
    weights_name: str = ""  # parameter with weights of the tokens
    keywords: Mapping[str, Any] = field(default_factory=dict)
    weights: Tensor | None = None

    def weigh(self, loss: Tensor) -> Tensor:
        return loss if self.weights is None else loss * self.weights

    def sum(self, loss: Tensor, mask: Tensor) -> Tensor:
        """Loss of the batch, without the weights of tokens. [B, L] -> scalar"""
        check_arguments(token_weights, {"mask": mask, "mode": self.mode, **self.keywords})
        return weighted_sum(loss, mask, token_weights(mask, self.mode, **self.keywords))

    def sum_weighted(self, loss: Tensor, mask: Tensor, clipped: Tensor | None = None) -> Results:
        """Loss of the batch and of each token, with the weights of tokens, and the share of clipped tokens."""
        weighted = apply_mask(self.weigh(loss), mask)
        results = {"loss": self.sum(weighted, mask), "token_loss": weighted}
        return results if clipped is None else {**results, "clipfrac": masked_mean(clipped.to(loss.dtype), mask)}


TOKEN_MEAN, SEQUENCE_MEAN = Aggregation("token-mean"), Aggregation("seq-mean-token-mean")
CORRECTED, CORRECTED_SEQUENCE_MEAN = (replace(one, weights_name="is_weights") for one in (TOKEN_MEAN, SEQUENCE_MEAN))
WEIGHTED, WEIGHTED_SEQUENCE_MEAN = (replace(one, weights_name="token_weights") for one in (TOKEN_MEAN, SEQUENCE_MEAN))


def bundle_aggregation(function: Function, arguments: dict[str, Any]) -> dict[str, Any]:
    """Replace the parameters of an aggregation by `agg`, if the function has it. Its default has the default mode."""
    parameter = inspect.signature(function).parameters.get("agg")
    if parameter is None:
        return arguments
    default = parameter.default
    agg = replace(
        default,
        mode=arguments.pop("agg", default.mode),
        keywords=arguments.pop("agg_kw", None) or {},
        weights=arguments.pop(default.weights_name, None),
    )
    return {**arguments, "agg": agg}
