"""The names in the catalogue of metrics, alphaapollo/config/metrics.yaml."""

from __future__ import annotations

from collections.abc import Iterable

from alphaapollo.config.metrics import find_metric, list_metrics


def documented() -> list[str]:
    """Names in the catalogue, with placeholders in angle brackets."""
    return [metric.name for metric in list_metrics()]


def undocumented(names: Iterable[str]) -> list[str]:
    """Names of metrics that the catalogue lacks."""
    return sorted(name for name in set(names) - {"step"} if find_metric(name) is None)
