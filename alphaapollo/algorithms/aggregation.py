"""Aggregation of a per-token loss to a scalar. In every loss_agg_mode it is a weighted sum with one weight per row:

    loss = sum over rows i of weight_i * (sum of the losses of the row's action tokens)

The driver computes the weights once, from the lengths of *all* trajectories of a mini-batch over all ranks, so that
micro-batches, ranks and packing cannot change a loss. All rows of a trajectory have the trajectory's weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from alphaapollo.algorithms.statistics import Groups, apply_mask
from alphaapollo.config.schema import AggregationMode


def overlong_filter(mask: Tensor, truncated: Tensor) -> Tensor:
    """Set the loss mask [B, L] to 0 where truncated [B] is true (DAPO, arXiv 2503.14476, section 3.4)."""
    return mask * (~truncated.bool()).to(mask.dtype).unsqueeze(1)


def row_weights(lengths: Tensor, group_ids: Tensor, mode: AggregationMode, horizon: float) -> Tensor:
    """Compute the weight that multiplies the token losses of each sequence: [N] float64, 0 for an empty sequence.

    docs/algorithms/loss_parts.md has the equation and the papers of each mode.

    Empty sequences and groups also count in the means. A sequence-level loss, with one value per sequence, uses the
    weights of seq-mean-token-sum.

    Args:
        lengths: [N] number of loss tokens of each sequence.
        group_ids: [N] group of each sequence.
        horizon: constant of seq-mean-token-sum-norm; ignored in other modes.
    """
    num_tokens = lengths.to(torch.float64)
    num_rows = max(1, num_tokens.numel())
    match mode:
        case "token-mean":
            weights = (1.0 / num_tokens.sum().clamp(min=1)).expand_as(num_tokens)
        case "token-sum":
            weights = torch.ones_like(num_tokens)
        case "seq-mean-token-sum":
            weights = torch.full_like(num_tokens, 1.0 / num_rows)
        case "seq-mean-token-mean":
            weights = 1.0 / (num_tokens.clamp(min=1) * num_rows)
        case "seq-mean-token-sum-norm":
            weights = torch.full_like(num_tokens, 1.0 / (num_rows * horizon))
        case "group-mean-token-mean":
            groups = Groups.from_ids(group_ids)
            weights = 1.0 / (groups.sum(num_tokens).clamp(min=1) * len(groups.sizes))[groups.group_index]
    return torch.where(num_tokens > 0, weights, torch.zeros_like(num_tokens))


def aggregate_token_losses(loss: Tensor, mask: Tensor, loss_weights: Tensor) -> Tensor:
    """Sum the loss over all tokens in the mask, with a weight per row. loss, mask [B, L], loss_weights [B]."""
    return (apply_mask(loss, mask).sum(dim=1) * loss_weights.to(loss.dtype)).sum()


def aggregate_sequence_losses(loss: Tensor, weights: Tensor) -> Tensor:
    """Compute the weighted sum of a sequence-level loss; rows of weight 0 are ignored. [B] each -> scalar."""
    return (apply_mask(loss, weights > 0) * weights.to(loss.dtype)).sum()
