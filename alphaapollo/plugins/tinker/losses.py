"""Losses of tinker as losses of a user's own loop: (log-probs [b, L], columns [b, L]) -> loss of each token.

The loss of a request is the plain sum over the tokens of its datums. Position i of a datum's N tokens predicts its
target i, so a datum becomes a row of N + 1 tokens, and the first is not trained on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from alphaapollo.own_loop.rows import make_row
from alphaapollo.plugins.tinker.wire import Datum, RequestError
from alphaapollo.types import Row
from alphaapollo.workers.loss_functions import LossFunction

MAX_TARGETS = 1024  # per token; each is a row


def cross_entropy(logp: Tensor, columns: dict[str, Tensor]) -> Tensor:
    """-w * logp."""
    return -logp * columns["tinker_weights"]


def importance_sampling(logp: Tensor, columns: dict[str, Tensor]) -> Tensor:
    """-r * A, with the ratio r = exp(logp - logprobs)."""
    return -_compute_ratio(logp, columns) * columns["tinker_advantages"]


def ppo(logp: Tensor, columns: dict[str, Tensor], low: float, high: float) -> Tensor:
    """-min(r * A, clip(r, low, high) * A), with absolute bounds of the ratio (arXiv 1707.06347, equation 7)."""
    ratio, advantages = _compute_ratio(logp, columns), columns["tinker_advantages"]
    return -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)


def cispo(logp: Tensor, columns: dict[str, Tensor], low: float, high: float) -> Tensor:
    """-stop_gradient(clip(r, low, high)) * logp * A (arXiv 2506.13585)."""
    return -_compute_ratio(logp, columns).clamp(low, high).detach() * logp * columns["tinker_advantages"]


def stable_reinforce(logp: Tensor, columns: dict[str, Tensor]) -> Tensor:
    """`cispo` with its default thresholds, another REINFORCE with an importance weight that is not differentiated.

    Tinker's server computes something else, which is not published: "a REINFORCE variant that stays stable even when
    the sampling policy differs" (tinker-docs.thinkingmachines.ai/tinker/losses/stable-reinforce, alpha).
    """
    return cispo(logp, columns, *SETTINGS["cispo"].values())


def dro(logp: Tensor, columns: dict[str, Tensor], beta: float) -> Tensor:
    """-(logp * A - beta / 2 * (logp - logprobs)^2) (arXiv 2405.19107)."""
    return -(logp * columns["tinker_advantages"] - 0.5 * beta * (logp - columns["tinker_logprobs"]) ** 2)


def _compute_ratio(logp: Tensor, columns: dict[str, Tensor]) -> Tensor:
    return (logp - columns["tinker_logprobs"]).exp()


FUNCTIONS = (cross_entropy, importance_sampling, ppo, cispo, stable_reinforce, dro)
LOSSES: dict[str, Callable[..., Tensor]] = {function.__name__: function for function in FUNCTIONS}
REQUIRED: dict[str, tuple[str, ...]] = dict.fromkeys(LOSSES, ("target_tokens", "logprobs", "advantages"))
REQUIRED["cross_entropy"] = ("target_tokens", "weights")  # weights: 1 if they are missing
SETTINGS: dict[str, dict[str, float]] = {
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    "dro": {"beta": 0.05},
}


def make_loss(name: str, config: Mapping[str, float | str]) -> LossFunction:
    """Return a loss with its settings. Raises RequestError for an unknown loss or setting."""
    if name not in LOSSES:
        names = ", ".join(LOSSES)
        raise RequestError(f"loss_fn={name} is not supported. Use {names}, or the method forward_backward_custom.")
    settings = SETTINGS.get(name, {})
    for key, value in config.items():
        if key not in settings:
            names = ", ".join(settings) or "none"
            raise RequestError(f"loss_fn_config[{key!r}] is not a setting of {name}. Its settings are: {names}.")
        if isinstance(value, str) or not 0 <= value < math.inf:
            raise RequestError(f"loss_fn_config[{key!r}]={value!r} must be a finite number of at least 0.")
    values = [float(config.get(key, default)) for key, default in settings.items()]
    if len(values) == 2 and values[0] > values[1]:
        raise RequestError(f"clip_low_threshold={values[0]} exceeds clip_high_threshold={values[1]}. Lower it.")
    function = LOSSES[name]
    return lambda logp, columns: function(logp, columns, *values)


def make_rows(datum: Datum, label: str, loss: str) -> list[Row]:
    """Return the row of a datum with targets [N], or the K rows with targets [N, K], one per column.

    Raises RequestError for inputs that are missing, unknown or of the wrong shape, with the datum's label.
    """
    tokens, inputs = datum.tokens, dict(datum.inputs)
    if loss == "cross_entropy" and "target_tokens" in inputs:
        inputs.setdefault("weights", np.ones(inputs["target_tokens"].shape, np.float32))
    if set(inputs) != set(REQUIRED[loss]):
        given, needed = ", ".join(datum.inputs) or "empty", ", ".join(REQUIRED[loss])
        raise RequestError(f"{label}: loss_fn_inputs are {given}. The loss {loss} needs exactly {needed}.")
    targets = inputs.pop("target_tokens")
    if targets.dtype != np.int64:
        raise RequestError(f"{label}: target_tokens have the dtype {targets.dtype}. Pass int64 token ids.")
    is_per_token = targets.ndim == 1 or loss == "cross_entropy"
    if not is_per_token or len(targets) != len(tokens) or not 0 < targets[:1].size <= MAX_TARGETS:
        allowed = f" or [{len(tokens)}, K] with K <= {MAX_TARGETS}" if loss == "cross_entropy" else ""
        shape = f"target_tokens have the shape {list(targets.shape)} for {len(tokens)} tokens of model_input"
        raise RequestError(f"{label}: {shape}. Pass at least one token, and the shape [{len(tokens)}]{allowed}.")
    columns: dict[str, Any] = {}
    for name, values in inputs.items():
        if values.shape != targets.shape:
            wrong = f"{name} have the shape {list(values.shape)}, target_tokens {list(targets.shape)}"
            raise RequestError(f"{label}: {wrong}. Pass the same shape.")
        columns[f"tinker_{name}"] = np.pad(values.reshape(len(tokens), -1).astype(np.float32), ((1, 0), (0, 0)))
    return [
        make_row([*tokens, ids[-1]], None, [tokens[0], *ids], **{name: one[:, k] for name, one in columns.items()})
        for k, ids in enumerate(targets.reshape(len(tokens), -1).T.tolist())
    ]


def evaluate_loss(loss: LossFunction, rows: Sequence[Row], logprobs: Sequence[np.ndarray]) -> float:
    """Compute the sum of a loss over rows in float64. logprobs: of each row's tokens [N + 1], the first is ignored."""
    total = 0.0
    for row, logp in zip(rows, logprobs, strict=True):
        names = [name for name in row.columns if name.startswith("tinker_")]
        columns = {name: torch.tensor(row.columns[name], dtype=torch.float64)[None, 1:] for name in names}
        total += float(loss(torch.tensor(logp, dtype=torch.float64)[None, 1:], columns).sum())
    return total
