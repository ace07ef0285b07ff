"""Losses and rows of plugins/tinker/losses.py."""

from __future__ import annotations

import math
from collections.abc import Callable

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
import pytest
import torch
from torch import Tensor

from alphaapollo.plugins.tinker.losses import LOSSES, REQUIRED, evaluate_loss, make_loss, make_rows
from alphaapollo.plugins.tinker.wire import Datum, RequestError


def f32(*values: float | list[float]) -> np.ndarray:
    return np.array(values, np.float32)


TARGETS, WEIGHTS = np.array([2, 3, 4]), f32(0, 1, 0.5)
LOGPROBS, ADVANTAGES = f32(-1, -2, -3), f32(1, -1, 2)
INPUTS: dict[str, np.ndarray] = {
    "target_tokens": TARGETS,
    "weights": WEIGHTS,
    "logprobs": LOGPROBS,
    "advantages": ADVANTAGES,
}
LOGP = [-0.5, -1.0, -6.0]  # ratios e^0.5, e, e^-3


def make_datum(loss: str, **changes: np.ndarray | None) -> Datum:
    inputs: dict[str, np.ndarray | None] = {name: INPUTS[name] for name in REQUIRED[loss]}
    inputs |= changes
    return Datum([1, 2, 3], {name: values for name, values in inputs.items() if values is not None})


def clip(low: float, high: float) -> Callable[[float], float]:
    return lambda ratio: min(max(ratio, low), high)


EXPECTED: list[tuple[str, dict[str, float], Callable[[float, float, float], float]]] = [
    ("importance_sampling", {}, lambda p, q, a: -math.exp(p - q) * a),
    (
        "ppo",
        {"clip_high_threshold": 2.0},
        lambda p, q, a: -min(math.exp(p - q) * a, clip(0.8, 2.0)(math.exp(p - q)) * a),
    ),
    ("stable_reinforce", {}, lambda p, q, a: -clip(0.0, 4.0)(math.exp(p - q)) * p * a),
    ("cispo", {"clip_low_threshold": 0.5}, lambda p, q, a: -clip(0.5, 4.0)(math.exp(p - q)) * p * a),
    ("dro", {}, lambda p, q, a: -(p * a - 0.025 * (p - q) ** 2)),
]


@pytest.mark.parametrize("name, config, formula", EXPECTED)
def test_policy_losses(name: str, config: dict[str, float], formula: Callable[[float, float, float], float]) -> None:
    loss = cloudpickle.loads(cloudpickle.dumps(make_loss(name, config)))
    assert loss.__module__.startswith("alphaapollo.")  # its errors are reported without a user's file
    rows = make_rows(make_datum(name), "datum 0", name)
    expected = sum(formula(p, float(q), float(a)) for p, q, a in zip(LOGP, LOGPROBS, ADVANTAGES, strict=True))
    assert evaluate_loss(loss, rows, [np.array([0.0, *LOGP])]) == pytest.approx(expected, rel=1e-12)


def test_cross_entropy() -> None:
    loss = make_loss("cross_entropy", {})
    (row,) = make_rows(make_datum("cross_entropy"), "datum 0", "cross_entropy")
    assert list(row.token_ids) == [1, 2, 3, 4] and list(row.action_mask) == [0, 1, 1, 1]
    assert row.columns["targets"] == [1, 2, 3, 4] and row.columns["tinker_weights"].tolist() == [0, 0, 1, 0.5]
    assert evaluate_loss(loss, [row], [np.array([9.0, *LOGP])]) == 4.0
    rows = make_rows(make_datum("cross_entropy", weights=None), "datum 0", "cross_entropy")
    assert evaluate_loss(loss, rows, [np.array([9.0, *LOGP])]) == 7.5


def test_several_targets_per_token() -> None:
    targets, weights = np.array([[2, 5], [3, 6], [4, 7]]), f32([0.5, 0.5], [1, 0], [0.25, 0.75])
    datum = make_datum("cross_entropy", target_tokens=targets, weights=weights)
    first, second = make_rows(datum, "datum 0", "cross_entropy")
    assert first.columns["targets"] == [1, 2, 3, 4] and second.columns["targets"] == [1, 5, 6, 7]
    assert list(second.token_ids) == [1, 2, 3, 7] and second.columns["tinker_weights"].tolist() == [0, 0.5, 0, 0.75]


def test_gradients_stop_at_the_clipped_ratio_of_cispo() -> None:
    logp = torch.tensor([LOGP], requires_grad=True)
    columns = {"tinker_logprobs": torch.tensor(LOGPROBS)[None], "tinker_advantages": torch.tensor(ADVANTAGES)[None]}
    make_loss("cispo", {})(logp, columns).sum().backward()
    expected: Tensor = -(logp.detach() - columns["tinker_logprobs"]).exp() * columns["tinker_advantages"]
    assert logp.grad is not None and torch.allclose(logp.grad, expected)


@pytest.mark.parametrize(
    "name, config, message",
    [
        ("gspo", {}, "loss_fn=gspo .*cross_entropy, .*dro.*forward_backward_custom"),
        ("ppo", {"beta": 1.0}, "'beta'.* is not a setting of ppo.*clip_low_threshold"),
        ("dro", {"beta": "1"}, "'beta'.*='1' must be a finite number"),
        ("dro", {"beta": math.inf}, "'beta'.*=inf must be a finite number"),
        ("ppo", {"clip_low_threshold": 1.5}, "clip_low_threshold=1.5 exceeds clip_high_threshold=1.2"),
    ],
)
def test_wrong_settings(name: str, config: dict[str, float | str], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        make_loss(name, config)


@pytest.mark.parametrize(
    "loss, changes, message",
    [
        ("ppo", {"advantages": None}, "ppo needs exactly target_tokens, logprobs, advantages"),
        ("ppo", {"clip_low_threshold": WEIGHTS}, "inputs are .*clip_low_threshold"),
        ("ppo", {"target_tokens": WEIGHTS}, "dtype float32"),
        ("ppo", {"target_tokens": TARGETS[:2]}, r"shape \[2\] for 3 tokens"),
        ("ppo", {"target_tokens": TARGETS[:, None]}, r"shape \[3, 1\] for 3 tokens.*the shape \[3\]\.$"),
        ("cross_entropy", {"target_tokens": np.zeros((3, 1025), np.int64), "weights": None}, "K <= 1024"),
        ("ppo", {"logprobs": LOGPROBS[:2]}, r"logprobs have the shape \[2\], target_tokens \[3\]"),
        ("cross_entropy", {"target_tokens": TARGETS[:, None]}, r"weights have the shape \[3\], target_tokens \[3, 1\]"),
    ],
)
def test_wrong_inputs(loss: str, changes: dict[str, np.ndarray | None], message: str) -> None:
    with pytest.raises(RequestError, match=f"^datum 7: .*{message}"):
        make_rows(make_datum(loss, **changes), "datum 7", loss)


def test_datum_without_tokens() -> None:
    with pytest.raises(RequestError, match="at least one token"):
        make_rows(Datum([], {"target_tokens": np.zeros(0, np.int64)}), "datum 0", "cross_entropy")
    assert list(LOSSES) == list(REQUIRED)
