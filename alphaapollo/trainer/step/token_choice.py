"""Tokens that a policy loss treats apart, chosen over a whole mini-batch (clip_cov and kl_cov: by a covariance).

The choice is made here, once, and not in the micro-batches: those are cut by length and by the memory of a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from alphaapollo.algorithms.end_to_end import EndToEnd
from alphaapollo.algorithms.policy_losses import Choose
from alphaapollo.config.schema import Actor
from alphaapollo.types import Trajectory
from alphaapollo.utils.seeds import derive_seed


def draw_keys(whole: EndToEnd, trajectories: Sequence[Trajectory], run_seed: int, step: int) -> Tensor:
    """A number in [0, 1) for each action token, a function of how many stand before it in which sample. [B, L]"""
    keys, is_action = np.zeros(tuple(whole.mask.shape)), whole.mask.bool().numpy()
    for row, own, one in zip(keys, is_action, trajectories, strict=True):
        generator = np.random.default_rng(derive_seed(run_seed, "choice", step, one.prompt_id, one.sample))
        row[own] = generator.random(own.sum())
    return whole.split(torch.from_numpy(keys))


def choose_tokens(
    choose: Choose,
    actor: Actor,
    logp: Tensor,
    advantages: Tensor,
    counted: Tensor,
    keys: Tensor,
    mini_batch_rows: Sequence[Sequence[int]],
) -> Tensor:
    """Apply `choose` to the tokens of each mini-batch. bool [B, L]

    Args:
        logp: [B, L] of the policy before its first step on the batch, like the three below.
        counted: bool, the action tokens that have a weight in the loss.
        keys: the order in which `choose` sees the tokens: theirs decide a draw and ties.
    """
    chosen = torch.zeros_like(counted)
    for rows in mini_batch_rows:
        places, columns = counted[list(rows)].nonzero(as_tuple=True)
        own = torch.tensor(rows)[places]
        order = keys[own, columns].argsort()
        own, columns = own[order], columns[order]
        chosen[own, columns] = choose(logp[own, columns], advantages[own, columns], actor)
    return chosen
