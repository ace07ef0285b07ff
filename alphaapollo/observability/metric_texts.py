"""The most important metrics of a run, and how people read metrics and times."""

from __future__ import annotations

from collections.abc import Container, Mapping

HEADLINES = (  # (optimized metric, metric shown beside it): the first pair whose optimized metric is logged is used
    ("distill/divergence", "distill/agreement"),
    ("distill/reverse_kl", "distill/agreement"),
    ("reward/accuracy", "val/accuracy"),
    ("critic/score/mean", "val/reward"),
    ("train/accuracy", "val/accuracy"),  # preference training
    ("train/loss", "val/loss"),
    ("accuracy/chosen", "accuracy/oracle"),
)
SHOWN_METRICS = {  # row -> {metric: format}; missing metrics are omitted
    "distill": {
        "distill/divergence": "divergence {:.4f}",
        "distill/reverse_kl": "reverse KL {:.4f}",
        "distill/agreement": "agreement {:.3f}",
    },
    "train": {
        "critic/score/mean": "reward {:.3f}",
        "reward/accuracy": "accuracy {:.3f}",
        "outcome/failed": "without a score {:.0%}",
        "train/loss": "loss {:.4f}",
        "train/accuracy": "accuracy {:.3f}",
        "train/margin": "margin {:.3f}",
        "response_length/mean": "length {:,.1f}",
    },
    "critic": {"critic/vf_explained_var": "critic: explained variance {:.2f}"},
    "val": {
        "val/accuracy": "accuracy {:.3f}",
        "val/reward": "reward {:.3f}",
        "val/failed": "without a score {:.0%}",
        "val/accuracy_greedy": "greedy {:.3f}",
        "val/loss": "loss {:.4f}",
        "val/margin": "margin {:.3f}",
    },
    "lost": {
        "response_length/clip_ratio": "truncated {:.0%}",
        "end/time_limit": "timed out {:.0%}",
    },
    "speed": {"rollout/tokens_per_second": "{:,.0f} tokens/s", "timing/step": "{:.2f} s per step"},
}
IF_POSITIVE = ("outcome/failed", "val/failed", *SHOWN_METRICS["lost"])  # metrics that are shown only if positive


def choose_headline(metrics: Container[str]) -> tuple[str, ...]:
    """Return the logged metrics that say most about a run, first the one that it optimizes.

    >>> choose_headline({"critic/score/mean": 0.0, "distill/divergence": 0.1})
    ('distill/divergence',)
    """
    chosen = next((names for names in HEADLINES if names[0] in metrics), ())
    return tuple(name for name in chosen if name in metrics)


def format_metric_rows(metrics: Mapping[str, float]) -> dict[str, str]:
    """Format the metrics of each row: `{"train": "reward 0.531   length 41.0", "speed": "7,400 tokens/s"}`."""
    rows = {
        row: "   ".join(
            template.format(metrics[name])
            for name, template in templates.items()
            if name in metrics and not _is_hidden(name, metrics)
        )
        for row, templates in SHOWN_METRICS.items()
    }
    return {row: text for row, text in rows.items() if text}


def _is_hidden(name: str, metrics: Mapping[str, float]) -> bool:
    if name in ("critic/score/mean", "reward/accuracy"):
        return metrics[name] == 0 and "distill/reverse_kl" in metrics  # distillation without rewards
    better_metric = {"distill/reverse_kl": "distill/divergence", "val/reward": "val/accuracy"}.get(name)
    return (name in IF_POSITIVE and metrics[name] <= 0) or better_metric in metrics


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
