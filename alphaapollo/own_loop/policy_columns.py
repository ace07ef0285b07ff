"""Inputs of a policy loss from the rows of a user's loop, as main_ppo's driver makes them from trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from alphaapollo.algorithms.aggregation import row_weights
from alphaapollo.algorithms.policy_losses import PolicyLoss
from alphaapollo.batching.batch import WEIGHTS, BatchLayout, Columns
from alphaapollo.config.schema import Config
from alphaapollo.config.schema.reward import TEACHER_SHARES
from alphaapollo.own_loop.rows import number_groups
from alphaapollo.own_loop.sampled_rows import check_engine_log_probs
from alphaapollo.types import LONGER_PROMPT, Row


def check_loss(config: Config, loss: PolicyLoss | None, rows: Sequence[Row]) -> None:
    """Raise ValueError if a policy loss (None: a user's function) cannot be computed on rows with these settings."""
    correction, name = config.algorithm.rollout_correction, f"loss={loss and loss.name}"
    if config.uses_trpo and not (loss and loss.is_surrogate):
        raise ValueError(
            'optim.name=trpo needs loss="surrogate", the ratio times the advantage. Pass it, or set adamw.'
        )
    if loss is None:
        return
    if not all("advantages" in row.columns for row in rows):
        raise ValueError(f"{name} needs advantages=[...], with one entry per row.")
    if loss.level == "sequence" and not all(np.isin(row.columns.get(WEIGHTS, 1), (0, 1)).all() for row in rows):
        raise ValueError(f"{name} is a loss of rows, so weights must be 0 or 1. Multiply advantages instead.")
    if loss.level == "sequence" and correction.method and correction.level == "token":
        raise ValueError(
            f"{name} is a loss of rows, so rollout_correction.level=token has no ratio. Set level=sequence."
        )
    has_old_logprobs = all("old_logprobs" in row.columns for row in rows)
    if correction.method and loss.anchor == "rollout":
        raise ValueError(f"{name} includes a correction. Set algorithm.rollout_correction.method=null.")
    if correction.method and not has_old_logprobs and not loss.on_policy:
        raise ValueError(
            f"rollout_correction.method={correction.method} compares the policy with the engine, but the old log-probs "
            "are the engine's. Pass old_logprobs=log_probs(rows), before the first step on them."
        )
    temperature = config.actor_rollout_ref.rollout.temperature
    if not has_old_logprobs and not loss.on_policy:
        check_engine_log_probs(rows, temperature)
    actor, corrected = config.actor_rollout_ref.actor, "algorithm.rollout_correction"
    fixes_of_readers = {  # settings that read the engine's log-probs
        f"{corrected}.method=null": correction.method,
        f"{corrected}.off_policy_mask_threshold=null": correction.off_policy_mask_threshold is not None,
        "kl_loss_type=low_var_kl": actor.use_kl_loss and actor.kl_loss_type == "unbiased",
    }
    if fix := " and ".join(fix for fix, reads_log_probs in fixes_of_readers.items() if reads_log_probs):
        check_engine_log_probs(rows, temperature, f"Set {fix}, or sample the rows.")
    if config.teacher.uses_full_vocabulary and config.teacher.models:
        names = ", ".join(config.teacher.models)
        if not all(TEACHER_SHARES in row.columns for row in rows):
            raise ValueError(f"several teachers need {TEACHER_SHARES}=[...]: for each row a weight of each of {names}.")


def make_columns(
    rows: Sequence[Row],
    layout: BatchLayout,
    loss: PolicyLoss,
    config: Config,
    denominator: float | None,
    groups: Sequence[object] | None,
    seed: int,
    scored: Columns[np.ndarray] | None = None,
    dtype: str = "float32",
) -> list[Columns[np.ndarray]]:
    """Return the columns of each rank.

    denominator: of the sum over tokens (or rows); None: the weights of actor.loss_agg_mode. groups: group of each row,
    for loss_agg_mode=group-mean-token-mean. seed: for losses that choose tokens. scored: columns of teachers behind
    servers.
    """
    actor = config.actor_rollout_ref.actor
    starts = [row.response_start for row in rows]

    def join(name: str) -> np.ndarray:
        full = [np.broadcast_to(row.columns[name], len(row.token_ids)) for row in rows]
        return np.concatenate([column[start:] for column, start in zip(full, starts, strict=True)])

    rank_rows = [batch.rows for batch in layout.rank_batches]
    old = join("old_logprobs") if "old_logprobs" in rows[0].columns else None
    if old is None and not loss.on_policy:
        old = layout.join_columns([rows_of_rank.rollout_logprobs for rows_of_rank in rank_rows])
    loss_weights, sequence_weights = compute_row_weights(rows, loss, config, denominator, groups)
    divergence_weights = None
    if config.teacher.uses_self_teacher:  # its loss is a mean over the rows with a longer prompt
        has_longer_prompt = [bool(row.columns.get(LONGER_PROMPT)) for row in rows]
        divergence_weights, _ = compute_row_weights(rows, loss, config, denominator, groups, has_longer_prompt)
    columns = {
        "advantages": join("advantages"),
        "old_logprobs": old,
        "ref_logprobs": join("ref_logprobs") if "ref_logprobs" in rows[0].columns else None,
        "loss_weights": loss_weights,
        "sequence_weights": sequence_weights,
        "divergence_weights": divergence_weights,
        "token_weights": join(WEIGHTS) if WEIGHTS in rows[0].columns and loss.level == "token" else None,
    }
    converted = {name: column.astype(dtype) for name, column in columns.items() if column is not None}
    if loss.select_tokens is not None:
        mask = layout.join_columns([rows_of_rank.action_mask for rows_of_rank in rank_rows])
        chosen = np.zeros(len(mask), dtype=np.uint8)
        tokens = np.random.default_rng(seed).permutation(np.flatnonzero(mask))
        old_logprobs, advantages = (
            torch.from_numpy(converted[name][tokens].astype(np.float64)) for name in ("old_logprobs", "advantages")
        )
        chosen[tokens] = loss.choose_tokens(old_logprobs, advantages, actor).numpy()
        converted["selected_tokens"] = chosen
    return layout.split_columns(replace(scored or Columns(), **converted))


def compute_row_weights(
    rows: Sequence[Row],
    loss: PolicyLoss,
    config: Config,
    denominator: float | None,
    groups: Sequence[object] | None,
    is_counted: Sequence[bool] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Compute the weight of each row's tokens and, in a loss of rows, of each row. float64 [B] each. is_counted: rows
    that the term of the loss applies to; None: all."""
    actor = config.actor_rollout_ref.actor
    lengths = torch.tensor([sum(row.action_mask) for row in rows], dtype=torch.float64)
    counted = torch.ones(len(rows), dtype=torch.bool) if is_counted is None else torch.tensor(is_counted)
    if denominator is None:
        ids = torch.tensor(number_groups(len(rows), groups))
        weights = torch.zeros(2, len(rows), dtype=torch.float64)
        for mode_weights, mode in zip(weights, (actor.loss_agg_mode, "seq-mean-token-sum"), strict=True):
            mode_weights[counted] = row_weights(lengths[counted], ids[counted], mode, config.loss_horizon)
        return weights[0].numpy(), weights[1].numpy()
    per_row = torch.where(counted, 1.0 / denominator, 0.0).double()
    per_token = per_row / lengths if loss.level == "sequence" else per_row  # a mean over the tokens of each row
    return per_token.numpy(), per_row.numpy()
