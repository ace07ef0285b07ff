"""The most important metrics of a run, and how people read metrics and times."""

from __future__ import annotations

from collections.abc import Container, Mapping

from alphaapollo.config.metrics import find_metric, list_headlines, load_catalogue


def choose_headline(metrics: Container[str]) -> tuple[str, ...]:
    """Return the logged metrics that say most about a run, first the one that it optimizes.

    >>> choose_headline({"critic/score/mean": 0.0, "distill/divergence": 0.1})
    ('distill/divergence',)
    """
    chosen = next((names for names in list_headlines() if names[0] in metrics), ())
    return tuple(name for name in chosen if name in metrics)


def format_metric_rows(metrics: Mapping[str, float]) -> dict[str, str]:
    """Format the metrics of each row: `{"train": "reward 0.531   length 41.0", "speed": "7,400 tokens/s"}`."""
    rows = {
        row: "   ".join(
            template.format(metrics[name])
            for name, template in templates.items()
            if name in metrics and not _is_hidden(name, metrics)
        )
        for row, templates in load_catalogue().console.items()
    }
    return {row: text for row, text in rows.items() if text}


def _is_hidden(name: str, metrics: Mapping[str, float]) -> bool:
    if name in ("critic/score/mean", "reward/accuracy"):
        return metrics[name] == 0 and "distill/reverse_kl" in metrics  # distillation without rewards
    better_metric = {"distill/reverse_kl": "distill/divergence", "val/reward": "val/accuracy"}.get(name)
    metric = find_metric(name)  # shares of failures and the like are shown only if they are positive
    is_failure = metric is not None and (metric.text.unit, metric.direction) == ("share", "down")
    return (is_failure and metrics[name] <= 0) or better_metric in metrics


def format_time_summary(seconds: Mapping[str, float]) -> str:
    """Format the sums of the timing metrics of a run, e.g. `time: generate 75%, update 25% of 4.0 s`; empty if none."""
    phases = {name.removeprefix("timing/"): spent for name, spent in seconds.items() if name != "timing/step"}
    total = sum(phases.values())
    longest_first = sorted(phases.items(), key=lambda item: -item[1])
    shown = [f"{phase} {spent / total:.0%}" for phase, spent in longest_first if total > 0 and spent >= 0.005 * total]
    return f"time: {', '.join(shown)} of {total:,.1f} s (docs/replay.md)" if shown else ""


def format_duration(seconds: float) -> str:
    """Format seconds as `0:07`, `12:30` or `1:05:00`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
