"""Hold the algorithms to a vectors file: `python -m tests.golden.check PATH [--dtype float32]`.

Each item names a function, its inputs and parameters, and what must come out: values, and gradients by autograd. Prints
a line a function, then what went wrong; exits 1 if anything failed or is unsupported.
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

from tests.golden import advantage_functions, loss_functions, other_functions
from tests.golden.common import Function, UnsupportedError, check_arguments

FUNCTIONS: dict[str, Function] = {
    **advantage_functions.FUNCTIONS,
    **loss_functions.FUNCTIONS,
    **other_functions.FUNCTIONS,
}
PLAIN_LISTS = {"index", "selected", "kls", "minibatch", "weights"}  # names, positions, series of numbers
GRADIENTS = {"grad_logits": "logits", "grad_chosen": "chosen", "grad_rejected": "rejected"}
GRADIENT_INPUT = {"value_loss": "vpreds"}  # `grad` is with respect to logp elsewhere


@dataclass(frozen=True)
class Tolerance:
    """|got - expected| <= rtol |expected| + atol. In float32 the absolute part is what cancellation between numbers of
    order one leaves; for arrays of small numbers it shrinks with the largest of them, down to 1e-6."""

    dtype: torch.dtype
    rtol: float
    atol: float

    def absolute(self, expected: Iterable[float]) -> float:
        if self.dtype is torch.float64:
            return self.atol
        largest = max((abs(x) for x in expected if math.isfinite(x)), default=1.0)
        return max(1e-6, self.atol * min(1.0, largest))


TOLERANCES = {
    "float64": Tolerance(torch.float64, 1e-9, 1e-12),
    "float32": Tolerance(torch.float32, 2e-5, 2e-5),
}


@dataclass
class Tally:
    """What became of the items of one function."""

    checked: int = 0
    failed: int = 0
    unsupported: int = 0
    worst: float = 0.0  # largest relative error


def evaluate(item: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The named results that the item expects. Raises UnsupportedError for what is not known here."""
    name = item["function"]
    function = FUNCTIONS.get(name)
    if function is None:
        raise UnsupportedError("no such function")
    arguments = {
        key: torch.tensor(value, dtype=dtype) if isinstance(value, list) and key not in PLAIN_LISTS else value
        for key, value in {**item["inputs"], **item["params"]}.items()
    }
    check_arguments(function, arguments)
    wanted = {key: _gradient_input(name, key) for key in item["expected"] if key.startswith("grad")}
    for source in wanted.values():
        arguments[source].requires_grad_()
    results = function(**arguments)
    for key, source in wanted.items():
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
    """(what is wrong or empty, the worst relative error: |got - expected| / (|expected| + atol / rtol))."""
    got_shape, got_numbers = _flatten(got)
    expected_shape, expected_numbers = _flatten(expected)
    if got_shape != expected_shape:
        return f"shape {got_shape}, expected {expected_shape}", math.inf
    atol = tolerance.absolute(expected_numbers)
    worst, wrong = 0.0, ""
    for position, (x, y) in enumerate(zip(got_numbers, expected_numbers, strict=True)):
        if x == y or (math.isnan(x) and math.isnan(y)):
            continue
        error = abs(x - y) / (abs(y) + atol / tolerance.rtol)
        worst = max(worst, math.inf if math.isnan(error) else error)
        if not error <= tolerance.rtol and not wrong:
            wrong = f"entry {position} is {x!r}, expected {y!r}"
    return wrong, worst


def _flatten(value: Any) -> tuple[list[int], list[float]]:
    tensor = value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
    return list(tensor.shape), tensor.double().flatten().tolist()


def check_item(item: dict[str, Any], tolerance: Tolerance) -> tuple[list[str], float]:
    """(what is wrong, the worst relative error) over everything that the item expects."""
    results = evaluate(item, tolerance.dtype)
    problems, worst = [], 0.0
    for key, expected in item["expected"].items():
        if key not in results:
            raise UnsupportedError(f"no result {key!r}")
        wrong, error = compare(results[key], expected, tolerance)
        worst = max(worst, error)
        if wrong:
            problems.append(f"{key}: {wrong}")
    return problems, worst


def check_file(path: Path, tolerance: Tolerance) -> tuple[dict[str, Tally], list[str]]:
    """Tallies by function, and one line for each item that failed or is unsupported."""
    tallies: dict[str, Tally] = {}
    lines = []
    for number, item in enumerate(json.loads(path.read_text(encoding="utf-8"))["items"]):
        name = item["function"]
        tally = tallies.setdefault(name, Tally())
        where = f"item {number}, {name} ({item.get('algo', '')}; {item.get('note', '')})"
        try:
            problems, worst = check_item(item, tolerance)
        except UnsupportedError as error:
            tally.unsupported += 1
            lines.append(f"unsupported: {where}: {error}")
            continue
        except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError) as error:
            problems, worst = [f"{type(error).__name__}: {error}"], math.inf
        tally.worst = max(tally.worst, worst)
        if problems:
            tally.failed += 1
            lines.append(f"failed: {where}: {'; '.join(problems)}")
        else:
            tally.checked += 1
    return tallies, lines


def report(tallies: dict[str, Tally], lines: list[str]) -> str:
    width = max(map(len, [*tallies, "function"]))
    table = [f"{'function':{width}}  checked  failed  unsupported  worst relative error"]
    for name in sorted(tallies):
        tally = tallies[name]
        table.append(
            f"{name:{width}}  {tally.checked:7}  {tally.failed:6}  {tally.unsupported:11}  {tally.worst:20.1e}"
        )
    totals = [sum(getattr(tally, what) for tally in tallies.values()) for what in ("checked", "failed", "unsupported")]
    table.append(f"{'total':{width}}  {totals[0]:7}  {totals[1]:6}  {totals[2]:11}")
    return "\n".join([*table, *lines])


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden.check", description=__doc__)
    parser.add_argument("path", type=Path, help="a vectors file")
    parser.add_argument("--dtype", choices=sorted(TOLERANCES), default="float64")
    arguments = parser.parse_args(argv)
    tallies, lines = check_file(arguments.path, TOLERANCES[arguments.dtype])
    print(report(tallies, lines))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
