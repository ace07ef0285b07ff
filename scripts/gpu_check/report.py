"""Report of gpu-check: measured and expected figures, with units and sources. scripts/gpu_report.py reads it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from scripts.checks import Outcome

UNITS = {  # by the end of a measurement's name; the first match is used
    "tokens_per_s": "tokens/s",
    "gb_per_s": "GB/s",
    "tflops": "TFLOP/s",
    "seconds": "s",
    "_ms": "ms",
    "gib": "GiB",
    "gb": "GB",
    "timing/step": "s",
    "timing/generate": "s",
    "timing/update": "s",
    "gap": "nats",
    "mismatch/abs": "nats",
}


@dataclass(frozen=True)
class Figure:
    """A number of a check. expected: lowest and highest value, and its source; measured: None before a measurement."""

    name: str  # "CHECK MEASUREMENT"
    unit: str
    expected: tuple[float, float] | None
    measured: float | None
    source: str = ""


def list_figures(check: str, measured: Mapping[str, Any], expected: Mapping[str, Sequence[Any]]) -> list[Figure]:
    """Return the numbers that a check measured, and those that were expected or are None, i.e. not measured yet."""
    figures = []
    for name in dict.fromkeys([*measured, *expected]):
        value = measured.get(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if name in expected or is_number or value is None:
            unit = next((unit for end, unit in UNITS.items() if name.endswith(end)), "")
            *limits, source = expected.get(name, ("",))
            span = (limits[0], limits[1]) if limits else None
            figures.append(Figure(f"{check} {name}", unit, span, value if is_number else None, source))
    return figures


def make_report(gpu: str, driver: str, outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """Return the entries of report.json beside the outcomes: date, GPU, driver, versions and figures."""
    found = {one.name: one for one in outcomes}
    versions = found["versions"].measurements if "versions" in found else {}
    figures = [f for name, one in found.items() for f in list_figures(name, one.measurements, one.expected)]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "gpu": gpu,  # empty on a CPU
        "driver": driver,
        "versions": {name: value for name, value in versions.items() if isinstance(value, str)},
        "figures": [asdict(figure) for figure in figures],
    }
