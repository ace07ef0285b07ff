"""Compare the algorithms with a file of reference vectors: `python -m tests.golden.check PATH [--dtype float32]`.

Each item of the file names a function, its inputs and parameters, and the expected values and gradients. The command
prints one line per function and one per failure. Its exit status is 1 if any item failed or is unsupported.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.golden import (
    advantage_functions,
    loss_functions,
    other_functions,
    policy_losses_2026,
    self_teacher_functions,
    teacher_functions,
    turn_functions,
)
from tests.golden.common import UnsupportedError, bundle_aggregation, check_arguments, golden_functions

MODULES = (
    advantage_functions,
    loss_functions,
    other_functions,
    policy_losses_2026,
    self_teacher_functions,
    teacher_functions,
    turn_functions,
)
FUNCTIONS = {name: function for module in MODULES for name, function in golden_functions(module).items()}
PLAIN_LISTS = {"index", "selected", "kls", "minibatch", "weights"}  # inputs that are not converted to tensors
GRADIENTS = {"grad_logits": "logits", "grad_chosen": "chosen", "grad_rejected": "rejected"}
GRADIENT_INPUT = {"value_loss": "vpreds"}  # other functions: `grad` is the gradient with respect to logp


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


@dataclass
class ItemCounts:
    """Results of the items of one function."""

    checked: int = 0
    failed: int = 0
    unsupported: int = 0
    largest: float = 0.0  # largest relative error


def evaluate(item: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Compute the results of an item by name. Raises UnsupportedError for unknown functions and parameters."""
    name = item["function"]
    function = FUNCTIONS.get(name)
    if function is None:
        raise UnsupportedError("no such function")
    arguments = {
        key: torch.tensor(value, dtype=dtype) if isinstance(value, list) and key not in PLAIN_LISTS else value
        for key, value in {**item["inputs"], **item["params"]}.items()
    }
    arguments = bundle_aggregation(function, arguments)
    check_arguments(function, arguments)
    sources = {key: _gradient_input(name, key) for key in item["expected"] if key.startswith("grad")}
    for source in sources.values():
        arguments[source].requires_grad_()
    results = function(**arguments)
    for key, source in sources.items():
        objective = results["loss"] if "loss" in results else results["value"].sum()
        results[key] = _gradient(objective, arguments[source])
    return results


def _gradient_input(function: str, key: str) -> str:
    return GRADIENT_INPUT.get(function, "logp") if key == "grad" else GRADIENTS[key]


def _gradient(objective: Tensor, source: Tensor) -> Tensor:
    if not objective.requires_grad:
        return torch.zeros_like(source)
    (gradient,) = torch.autograd.grad(objective, source, retain_graph=True, allow_unused=True)
    return torch.zeros_like(source) if gradient is None else gradient


def compare(got: Any, expected: Any, tolerance: Tolerance) -> tuple[str, float]:
    """Return the problem (empty if none) and the largest error relative to |expected| + atol / rtol."""
    got_shape, got_numbers = _flatten(got)
    expected_shape, expected_numbers = _flatten(expected)
    if got_shape != expected_shape:
        return f"shape {got_shape}, expected {expected_shape}", math.inf
    atol = tolerance.absolute(expected_numbers)
    largest, problem = 0.0, ""
    for position, (x, y) in enumerate(zip(got_numbers, expected_numbers, strict=True)):
        if x == y or (math.isnan(x) and math.isnan(y)):
            continue
        error = abs(x - y) / (abs(y) + atol / tolerance.rtol)
        largest = max(largest, math.inf if math.isnan(error) else error)
        if not error <= tolerance.rtol and not problem:
            problem = f"entry {position} is {x!r}, expected {y!r}"
    return problem, largest


def _flatten(value: Any) -> tuple[list[int], list[float]]:
    tensor = value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
    return list(tensor.shape), tensor.double().flatten().tolist()


def check_item(item: dict[str, Any], tolerance: Tolerance) -> tuple[list[str], float]:
    """Return the problems of an item and the largest relative error over its expected results."""
    results = evaluate(item, tolerance.dtype)
    problems, largest = [], 0.0
    for key, expected in item["expected"].items():
        if key not in results:
            raise UnsupportedError(f"no result {key!r}")
        problem, error = compare(results[key], expected, tolerance)
        largest = max(largest, error)
        if problem:
            problems.append(f"{key}: {problem}")
    return problems, largest


def check_file(path: Path, tolerance: Tolerance) -> tuple[dict[str, ItemCounts], list[str]]:
    """Return the counts by function, and one line for each item that failed or is unsupported."""
    counts: dict[str, ItemCounts] = {}
    lines = []
    for number, item in enumerate(json.loads(path.read_text(encoding="utf-8"))["items"]):
        name = item["function"]
        count = counts.setdefault(name, ItemCounts())
        where = f"item {number}, {name} ({item.get('algo', '')}; {item.get('note', '')})"
        try:
            problems, largest = check_item(item, tolerance)
        except UnsupportedError as error:
            count.unsupported += 1
            lines.append(f"unsupported: {where}: {error}")
            continue
        except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError) as error:
            problems, largest = [f"{type(error).__name__}: {error}"], math.inf
        count.largest = max(count.largest, largest)
        if problems:
            count.failed += 1
            lines.append(f"failed: {where}: {'; '.join(problems)}")
        else:
            count.checked += 1
    return counts, lines


def report(counts: dict[str, ItemCounts], lines: list[str]) -> str:
    width = max(map(len, [*counts, "function"]))
    table = [f"{'function':{width}}  checked  failed  unsupported  largest relative error"]
    for name in sorted(counts):
        count = counts[name]
        table.append(
            f"{name:{width}}  {count.checked:7}  {count.failed:6}  {count.unsupported:11}  {count.largest:22.1e}"
        )
    totals = [sum(getattr(count, what) for count in counts.values()) for what in ("checked", "failed", "unsupported")]
    table.append(f"{'total':{width}}  {totals[0]:7}  {totals[1]:6}  {totals[2]:11}")
    return "\n".join([*table, *lines])


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden.check", description=__doc__)
    parser.add_argument("path", type=Path, help="a vectors file")
    parser.add_argument("--dtype", choices=sorted(TOLERANCES), default="float64")
    arguments = parser.parse_args(argv)
    counts, lines = check_file(arguments.path, TOLERANCES[arguments.dtype])
    print(report(counts, lines))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
