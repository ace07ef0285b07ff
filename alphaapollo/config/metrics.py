"""Catalogue of metrics (metrics.yaml): what each metric means, which values are healthy, and where it is shown."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import msgspec

from alphaapollo.utils.disk import read_yaml
from alphaapollo.utils.registry import suggest_similar

DIRECTIONS = {"up": "higher is better", "down": "lower is better"}
AMOUNTS = re.compile("count|tokens|tokens/s|s|GiB|groups|requests|rows|prompts|turns|passes")  # units
LINK = re.compile(r"\[([^]]*)\]\(([^)]*)\)")


class MetricText(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Entry of the catalogue. Links of its texts are relative to docs/."""

    meaning: str
    unit: str = ""
    healthy: str = ""
    otherwise: str = ""  # what to do about other values


class MainMetric(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where one of the most important metrics is shown, as metrics.yaml explains."""

    validation: str = ""
    beside: str = ""
    end: int = 0
    plot: bool = False
    curve: bool = True


class Catalogue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Contents of metrics.yaml."""

    main: dict[str, MainMetric]
    console: dict[str, dict[str, str]]
    health: dict[str, tuple[str, ...]]
    costs: dict[str, str]
    metrics: dict[str, dict[str, MetricText]]


@dataclass(frozen=True)
class Metric:
    """Metric of the catalogue."""

    name: str  # with placeholders
    direction: str  # a key of DIRECTIONS, or empty
    text: MetricText
    pattern: re.Pattern[str]  # of the names that it stands for


@cache
def load_catalogue() -> Catalogue:
    """Read metrics.yaml."""
    return msgspec.convert(read_yaml(Path(__file__).with_name("metrics.yaml")), Catalogue)


@cache
def list_metrics() -> tuple[Metric, ...]:
    """Return all metrics of the catalogue."""
    metrics = []
    for names, text in (entry for entries in load_catalogue().metrics.values() for entry in entries.items()):
        for name in names.split(", "):
            direction = next((word for word in DIRECTIONS if name.endswith(f" {word}")), "")
            name = name.removesuffix(f" {direction}")
            parts = re.split(r"(<[^>]+>)", name)  # every second one is a placeholder
            texts = [re.escape(part) for part in parts]
            texts[1::2] = ["(_greedy|<pass>)?" if part == "<pass>" else ".+" for part in parts[1::2]]
            metrics.append(Metric(name, direction, text, re.compile("".join(texts))))
    return tuple(metrics)


@lru_cache(maxsize=4096)
def find_metric(name: str) -> Metric | None:
    """Return the metric of this name. If several patterns match, the one with the longest text counts."""
    matches = [metric for metric in list_metrics() if metric.pattern.fullmatch(name)]
    return max(matches, key=lambda metric: len(re.sub("<[^>]+>", "", metric.name)), default=None)


def is_lower_better(name: str) -> bool:
    """Return whether lower values of a metric are better, e.g. of `val/loss`. A metric that is not in the catalogue is
    compared like the training metric with the same last part."""
    metric = find_metric(name) or find_metric(f"train/{name.rpartition('/')[2].removesuffix('_greedy')}")
    return metric is not None and metric.direction == "down"


def find_bounds(name: str) -> tuple[float, float]:
    """Return the lowest and the highest value that a metric can have: (0, 1) for shares, at least 0 for amounts."""
    unit = metric.text.unit if (metric := find_metric(name)) else ""
    return (0.0, 1.0) if unit.startswith("share") else (0.0 if AMOUNTS.fullmatch(unit) else -math.inf, math.inf)


def describe_axis(names: Iterable[str]) -> str:
    """Describe unit and direction of metrics, e.g. `share, higher is better`, as far as they are the same."""
    metrics = [find_metric(name) for name in names]
    units = {metric.text.unit if metric else "" for metric in metrics}
    directions = {DIRECTIONS.get(metric.direction, "") if metric else "" for metric in metrics}
    return ", ".join(found for same in (units, directions) if len(same) == 1 and (found := min(same)))


def explain_metric(name: str) -> str:
    """Return one line about a metric, or that it is unknown, with similar names."""
    if (metric := find_metric(name)) is None:
        hint = suggest_similar(name, [metric.name for metric in list_metrics()])
        return f"{name}: unknown metric.{hint} Metrics of your own code are not in alphaapollo/config/metrics.yaml."
    text = metric.text
    parts = [
        text.meaning,
        text.healthy and f"healthy: {text.healthy}",
        text.otherwise and f"otherwise: {text.otherwise}",
    ]
    line = LINK.sub(r"\1 (docs/\2)", "; ".join(filter(None, [describe_axis([name]), *parts])))
    return f"{name}: metric ({line.replace('`', '')})"


def list_headlines() -> list[tuple[str, str]]:
    """Return the metrics that can stand for a run, the best first, and the metric beside each."""
    return [(name, metric.beside) for name, metric in load_catalogue().main.items() if metric.beside]


def list_end_metrics() -> list[list[str]]:
    """Return the metrics of each line at the end of a run, of which it has the first one that was logged."""
    main = load_catalogue().main
    numbers = sorted({metric.end for metric in main.values()} - {0})
    return [[name for name, metric in main.items() if metric.end == number] for number in numbers]
