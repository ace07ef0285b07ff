"""Batches for losses that select tokens over a mini-batch."""

from __future__ import annotations

from dataclasses import replace

import torch

from alphaapollo.algorithms.policy_losses import PolicyLoss, PolicyLossInputs
from alphaapollo.config.schema import Actor


def with_choice(batch: PolicyLossInputs, loss: PolicyLoss, actor: Actor) -> PolicyLossInputs:
    """The batch as a complete mini-batch, with the tokens that the loss selects, if it does."""
    if loss.select_tokens is None:
        return batch
    is_action = batch.mask.bool()
    chosen = torch.zeros_like(is_action)
    chosen[is_action] = loss.select_tokens(batch.old_logp[is_action], batch.advantages[is_action], actor)
    return replace(batch, selected_tokens=chosen)
