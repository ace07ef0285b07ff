"""Results of the reference with the names and parameters of the vectors files.

A function gets the inputs and parameters of an item, and its expected values, because the reference takes the selected
tokens of kl_cov from a recording.
"""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from alphaapollo.plugins.verify.reference import advantages, losses
from alphaapollo.plugins.verify.reference.samples import build_batch
from tests.builders import make_group, make_trajectory, make_turn
from tests.plugins.verify import reference_batches
from tests.plugins.verify.reference_batches import make_samples

Given = dict[str, Any]
"""Inputs or results by name."""


def number_turns(mask: Tensor, turn_ids: Tensor | None) -> Tensor:
    """Number of each action token's turn, among all rows; -1 for others. turn_ids: increasing per row; None = runs of 1
    in the mask. [B, L]"""
    if turn_ids is None:
        starts = mask.bool() & ~torch.nn.functional.pad(mask.bool(), (1, 0))[:, :-1]
        turn_ids = starts.cumsum(dim=1)
    inside = mask.bool()
    rows = torch.arange(len(mask)).unsqueeze(1).expand_as(mask)
    pairs = torch.stack([rows[inside], turn_ids[inside].to(torch.int64)], dim=1)
    numbers = torch.full(mask.shape, -1)
    numbers[inside] = torch.unique(pairs, dim=0, return_inverse=True)[1]
    return numbers


def to_matrix(mask: Tensor, values: Any) -> Tensor:
    return torch.zeros_like(mask).masked_scatter(mask.bool(), torch.as_tensor(values))


def compute_loss(given: Given, config: Any) -> Given:
    """Policy loss and KL; without advantages, the KL alone."""
    mask, logp = given["mask"], given["logp"].requires_grad_()
    old = given.get("old_logp", given.get("behavior_logp", logp.detach()))
    columns = {"logp": logp, "old": old, "advantages": given.get("adv", given.get("seq_adv", torch.zeros_like(mask)))}
    columns |= {"ref": given["ref_logp"]} if "ref_logp" in given else {}
    columns |= {"engine": old - given["is_weights"].log()} if "is_weights" in given else {}
    if "selected" in given:
        selected = torch.zeros_like(mask)
        selected[tuple(torch.tensor(given["selected"]).T)] = 1
        columns["selected"] = selected.bool()
    total, each = reference_batches.compute_loss(mask, config, columns, given.get("index"))
    (0 * logp.sum() + total).backward()
    token_loss = {"token_loss": to_matrix(mask, torch.cat(each).detach())} if each and each[0].ndim else {}
    return {"loss": total.detach(), "grad": logp.grad, **token_loss}


def compute_value_loss(given: Given, config: Any) -> Given:
    mask, values = given["mask"], given["vpreds"].requires_grad_()
    token_loss = losses.value_loss(values, given["old_values"], given["returns"], config.critic.cliprange_value) * mask
    weights = losses.weigh(make_samples(mask), config, "token-mean", of_loss=False)
    loss = sum(weight * row.sum() for weight, row in zip(weights, token_loss, strict=True))
    loss.backward()
    return {"loss": loss.detach(), "grad": values.grad, "token_loss": token_loss.detach()}


def compute_divergence(given: Given, config: Any) -> Given:
    """Divergence from a teacher, or KL to the reference, over the vocabulary."""
    logits, other = given["logits"].requires_grad_(), given.get("teacher_logits", given.get("ref_logits"))
    mask = given.get("mask", torch.ones(logits.shape[:2], dtype=torch.float64))
    rows = (x.log_softmax(-1).flatten(0, 1) for x in (logits, other))
    value = losses.divergence(*rows, config.teacher).view(mask.shape) * mask
    weights = losses.weigh(make_samples(mask), config, "token-mean" if "mask" in given else "token-sum", of_loss=False)
    loss = (value * given.get("token_weights", mask) * torch.tensor(weights, dtype=torch.float64)[:, None]).sum()
    loss.backward()
    value = value.detach()
    return {"loss": loss.detach(), "grad_logits": logits.grad, "token_divergence": value, "value": value}


def compute_weights(given: Given, config: Any) -> Given:
    """Aggregation. The filter of truncated responses leaves the tokens whose weight is not 0."""
    mask, index = given["mask"], given.get("index")
    rows = mask.bool().any(1).nonzero().flatten().tolist()
    samples = make_samples(mask[rows], index and [index[row] for row in rows], given.get("truncated", ()))
    weights = mask.clone()
    for row, weight in zip(rows, losses.weigh(samples, config, given.get("mode", "token-sum")), strict=True):
        weights[row] *= weight
    return {"weights": weights, "value": weights, "loss": (weights * given.get("loss_mat", 0)).sum()}


def compute_correction(given: Given, config: Any) -> Given:
    mask, current = given["mask"], given.get("train_logp", given.get("logp"))
    columns = {"logp": current, "old": current, "engine": given.get("rollout_logp", given.get("behavior_logp"))}
    terms = reference_batches.make_terms(mask, make_samples(mask), {**columns, "advantages": given.get("adv", mask)})
    weights = torch.cat([losses.correction(x, config.algorithm.rollout_correction) for x in terms if len(x.logp)])
    return {"value": to_matrix(mask, weights), "keep": to_matrix(mask, weights)}


def compute_of_samples(given: Given, config: Any) -> Given:
    mask = given["mask"]
    batch = advantages.Batch(make_samples(mask, given["index"]), [], {}, int(mask.sum()))
    for sample, rewards in zip(batch.samples, given.get("score_matrix", ()), strict=False):
        named = dict(zip("abc", rewards.tolist(), strict=True))
        sample.trajectory.score = SimpleNamespace(components=named, component=named.__getitem__)
    scores = given.get("scores", given.get("correct", mask[:, 0])).numpy()
    mini_batches = given.get("minibatch", [[*range(len(mask))]])
    name = config.algorithm.adv_estimator
    found = advantages.advantages_of_samples(batch, config.algorithm, name, scores, mini_batches)
    return {"seq_adv": found, "advantages": torch.from_numpy(found)[:, None] * mask}


def compute_of_tokens(given: Given, config: Any) -> Given:
    """Rows are different groups. Each token is a turn, except for turn_gae and turn_group."""
    if "turn_rewards" in given:  # a turn is a token
        mask = (torch.arange(given["turn_rewards"].shape[1]) < given["n_turns"][:, None]).double()
        given = {**given, "mask": mask, "token_rewards": given["turn_rewards"]}
    rows = given["mask"].bool().any(1).nonzero().flatten().tolist()
    columns = {name: value[rows] for name, value in given.items() if isinstance(value, Tensor)}
    mask, index = columns["mask"], given.get("index")
    flat = {name: value[mask.bool()].numpy() for name, value in columns.items() if value.shape == mask.shape}
    rewards = flat.get("token_rewards", flat.get("token_scores"))
    turn_ids = columns.get("turn_ids") if config.algorithm.adv_estimator == "turn_gae" else mask.cumsum(1)
    numbers = number_turns(mask, turn_ids)[mask.bool()].numpy()
    batch = advantages.Batch(make_samples(mask, index and [index[row] for row in rows]), [], {}, len(rewards))
    for row, sample in enumerate(batch.samples):
        sample.turns = [np.flatnonzero(numbers == turn) for turn in np.unique(numbers[sample.tokens])]
        sample.rewards = np.array([rewards[turn].sum() for turn in sample.turns])
        batch.greedy[row] = float(columns["baselines"][row]) if "baselines" in columns else 0.0
    names = {"old_logp": "old_logprobs", "ref_logp": "ref_logprobs", "values": "values"}
    recorded = {names[name]: value for name, value in flat.items() if name in names}
    pair = advantages.compute_advantages(batch, config, recorded, config.algorithm.kl_ctrl.kl_coef, 0.0, [])
    found, returns = (to_matrix(given["mask"], column) for column in pair)
    if "turn_rewards" in given:
        return {"turn_adv": found}
    return {"advantages": found, "returns": returns, "rewards": returns}


def compute_rewards(given: Given, config: Any) -> Given:
    """Rewards of trajectories with one token per turn: on their tokens, or their sum."""
    mask = given.get("mask", torch.arange(99) < given.get("lengths", torch.zeros(1))[:, None]).double()
    groups = []
    for row, score in zip(mask, given.get("scores", torch.zeros(len(mask))).tolist(), strict=True):
        gaps = [b - a - 1 for a, b in pairwise([-1, *row.nonzero().flatten().tolist()])]
        groups.append(make_group(make_trajectory(*(make_turn([0], [0] * gap) for gap in gaps), score=score)))
    samples = build_batch(groups, config).samples
    if "lengths" in given:
        return {"value": [sample.total for sample in samples]}
    return {"value": to_matrix(mask, np.concatenate([sample.rewards for sample in samples]))}
