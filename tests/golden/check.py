"""Compare results with the items of a vectors file, which have a function's inputs and parameters, and the expected
values and gradients."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.golden import functions

FUNCTIONS = functions.golden_functions(functions)
ITEMS: dict[str, dict[str, Any]] = {
    f"{name}-{number}": item
    for name in ("vectors", "vectors_2026")
    for number, item in enumerate(json.loads(Path(__file__).with_name(f"{name}.json").read_text("utf-8"))["items"])
}
PLAIN_LISTS = {"index", "selected", "kls", "minibatch", "weights"}  # inputs that are not converted to tensors
GRADIENTS = {"grad": "logp", "grad_logits": "logits", "grad_chosen": "chosen", "grad_rejected": "rejected"}


@dataclass(frozen=True)
class Tolerance:
    """|got - expected| <= rtol |expected| + atol. In float32, atol covers cancellation between numbers of order one.
    For arrays of smaller numbers it is scaled by the largest of them, down to 1e-6."""

    dtype: torch.dtype
    rtol: float
    atol: float

    def absolute(self, expected: Iterable[float]) -> float:
        if self.dtype is torch.float64:
            return self.atol
        largest = max((abs(x) for x in expected if math.isfinite(x)), default=1.0)
        return max(1e-6, self.atol * min(1.0, largest))


TOLERANCES = {"float64": Tolerance(torch.float64, 1e-9, 1e-12), "float32": Tolerance(torch.float32, 2e-5, 2e-5)}


def to_tensors(inputs: dict[str, Any], dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    return {
        key: torch.tensor(value, dtype=dtype) if isinstance(value, list) and key not in PLAIN_LISTS else value
        for key, value in inputs.items()
    }


def evaluate(item: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Compute the results of an item by name."""
    arguments = to_tensors(item["inputs"] | item["params"], dtype)
    sources = {key: GRADIENTS[key] for key in item["expected"] if key in GRADIENTS}
    for source in sources.values():
        arguments[source].requires_grad_()
    results = FUNCTIONS[item["function"]](**arguments)
    for key, source in sources.items():
        (results[key],) = torch.autograd.grad(results["loss"], arguments[source], retain_graph=True)
    return results


def compare(got: Any, expected: Any, tolerance: Tolerance) -> str:
    """Return the problem; empty if there is none."""
    got_shape, got_numbers = _flatten(got)
    expected_shape, expected_numbers = _flatten(expected)
    if got_shape != expected_shape:
        return f"shape {got_shape}, expected {expected_shape}"
    atol = tolerance.absolute(expected_numbers)
    for position, (x, y) in enumerate(zip(got_numbers, expected_numbers, strict=True)):
        if x == y or (math.isnan(x) and math.isnan(y)):
            continue
        if not abs(x - y) <= tolerance.rtol * abs(y) + atol:
            return f"entry {position} is {x!r}, expected {y!r}"
    return ""


def _flatten(value: Any) -> tuple[list[int], list[float]]:
    tensor = value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
    return list(tensor.shape), tensor.double().flatten().tolist()
