"""Mini-batches of the reference, made from matrices with one row per sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from alphaapollo.config.keys import replace_value
from alphaapollo.config.schema import Config
from alphaapollo.plugins.verify.reference import losses
from alphaapollo.plugins.verify.reference.samples import Sample, to_namespace

ACTOR, CORRECTION = "actor_rollout_ref.actor.", "algorithm.rollout_correction."
LOSS, AGGREGATION = f"{ACTOR}policy_loss.loss_mode", f"{ACTOR}loss_agg_mode"


def make_config(values: Mapping[str, Any]) -> Any:
    """Configuration of a recording, from dotted keys."""
    config = Config()
    for key, value in values.items():
        config = replace_value(config, key, value)
    return to_namespace(config.model_dump())


def make_samples(mask: Tensor, index: Sequence[Any] | None = None, cut: Sequence[float] = ()) -> list[Sample]:
    """Samples whose tokens are those of the mask, in one turn each. index: group of each row; by default, rows are
    different groups. cut: whether a row ends at the token limit."""
    index = range(len(mask)) if index is None else index
    groups = {name: number for number, name in enumerate(dict.fromkeys(index))}
    ends, samples = [0, *mask.sum(1).long().cumsum(0).tolist()], []
    for number, row in enumerate(mask.tolist()):
        end = "token_limit" if any(cut[number : number + 1]) else "done"
        trajectory = SimpleNamespace(end=end, rows=[SimpleNamespace(action_mask=row)])
        tokens, group = slice(ends[number], ends[number + 1]), groups[index[number]]
        turns = [np.arange(tokens.start, tokens.stop)]
        samples.append(Sample(group, trajectory, trajectory.rows, [number], tokens, turns, np.zeros(1), [None]))
    return samples


def make_terms(mask: Tensor, samples: list[Sample], columns: Mapping[str, Tensor]) -> list[losses.Terms]:
    """Terms of each sample. columns: [B, L], or [B] with one value per sample."""
    wide = {name: x if x.ndim == 2 else x[:, None].expand_as(mask) for name, x in columns.items()}
    wide.setdefault("engine", wide["old"])
    inside = enumerate(mask.bool())
    return [losses.Terms(samples[i], **{name: x[i][kept] for name, x in wide.items()}) for i, kept in inside]


def compute_loss(
    mask: Tensor, config: Any, columns: Mapping[str, Tensor], index: Sequence[Any] | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Loss of a mini-batch of the rows with tokens, and the loss of each token (or sample) before the aggregation."""
    actor, rows = config.actor_rollout_ref.actor, mask.bool().any(1).nonzero().flatten().tolist()
    samples = make_samples(mask[rows], index and [index[row] for row in rows])
    terms = make_terms(mask[rows], samples, {name: x[rows] for name, x in columns.items()})
    of_tokens, of_samples = (losses.weigh(samples, config, m) for m in (actor.loss_agg_mode, "seq-mean-token-sum"))
    total, each = torch.zeros((), dtype=torch.float64), []
    for x, of_token, of_sample in zip(terms, of_tokens, of_samples, strict=True):
        total = total + losses.loss_of_sample(x, of_token, of_sample, config, None)
        loss, penalty = losses.policy_loss(x, actor, None)
        each.append(loss * losses.correction(x, config.algorithm.rollout_correction) + penalty)
    return total, each
