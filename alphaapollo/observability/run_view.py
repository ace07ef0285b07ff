"""What the console knows about a run, and its layout as lines of text."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

from rich.text import Text

from alphaapollo.observability.curve import plot_curves

HEADLINES = (  # the first one whose first metric a run logs says what the run optimizes; the others go with it
    ("distill/divergence", "distill/agreement"),
    ("distill/reverse_kl", "distill/agreement"),
    ("reward/accuracy", "val/accuracy"),
    ("critic/score/mean", "val/reward"),
    ("train/accuracy", "val/accuracy"),  # of preferences
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
        "train/loss": "loss {:.4f}",
        "response_length/mean": "length {:,.1f}",
    },
    "critic": {"critic/vf_explained_var": "critic: explained variance {:.2f}"},
    "val": {
        "val/accuracy": "accuracy {:.3f}",
        "val/reward": "reward {:.3f}",
        "val/accuracy_greedy": "greedy {:.3f}",
        "val/loss": "loss {:.4f}",
    },
    "lost": {  # shown only if not 0
        "outcome/failed": "failed {:.0%}",
        "response_length/clip_ratio": "truncated {:.0%}",
        "end/time_limit": "timed out {:.0%}",
        "val/failed": "failed in validation {:.0%}",
    },
    "speed": {"rollout/tokens_per_second": "{:,.0f} tokens/s", "timing/step": "{:.2f} s per step"},
}
RECENT_STEPS = 20  # iterations from which the remaining time is estimated
NEWEST_STEPS = 3  # iterations whose tokens are expected in those that follow
FIXED_PHASES = ("validate", "publish", "checkpoint")  # their time does not depend on the sampled tokens
LABEL_WIDTH, BAR_WIDTH, MIN_WIDTH_WITH_BARS = 12, 24, 66  # narrower windows have no bars
CURVE_WIDTH, CURVE_HEIGHT, CURVE_POINTS = 76, 6, 160


@dataclass
class Phase:
    """Part of an iteration whose progress is counted, e.g. `generate` with 12 of 32 groups."""

    name: str
    total: int
    since: float  # elapsed seconds at its begin
    done_before: int  # done at its begin, e.g. before a resume
    done: int = 0
    text: str = ""  # shown after the progress
    in_flight: int = 0  # units that have started; on average, half of each is done


@dataclass(frozen=True)
class StepCost:
    """Cost of an iteration, or of several that were logged at once."""

    steps: int
    seconds: float
    fixed_seconds: float  # in FIXED_PHASES
    tokens: float  # sampled; 0 for a command that does not sample


@dataclass
class RunView:
    """State of a run that the console shows. Times are seconds since the console was opened (`elapsed`)."""

    title: str = ""
    total_steps: int = 0  # 0: not known yet, or the command has no iterations
    step: int = 0  # completed iterations
    activity: str = "start"  # e.g. `start: importing vllm`
    phase: Phase | None = None
    last_metrics: dict[str, float] = field(default_factory=dict)  # last value of each metric
    curve_points: list[tuple[float, float]] = field(default_factory=list)
    sample: tuple[str, str, str] | None = None  # label, reward and prompt, answer
    warnings: deque[str] = field(default_factory=lambda: deque(maxlen=3))
    last_end: tuple[float, int] | None = None  # time and number of the last completed iteration
    costs: deque[StepCost] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    tokens: int = 0  # sampled in the running iteration, by groups that have finished

    @property
    def curve_name(self) -> str:
        """Return the name of the plotted metric; empty before the first metrics."""
        return next(iter(choose_headline(self.last_metrics)), "")

    @property
    def running_phase(self) -> Phase | None:
        return phase if (phase := self.phase) and phase.done < phase.total else None  # a thread may replace it

    def update(self, step: int, metrics: Mapping[str, float], elapsed: float) -> None:
        """Add the metrics of an iteration."""
        if self.last_end and step > self.last_end[1]:
            fixed = sum(metrics.get(f"timing/{phase}", 0.0) for phase in FIXED_PHASES)
            cost = (step - self.last_end[1], elapsed - self.last_end[0], fixed, metrics.get("rollout/tokens", 0.0))
            self.costs.append(StepCost(*cost))
        self.step, self.phase, self.last_end, self.tokens = step, None, (elapsed, step), 0
        self.last_metrics |= metrics
        value = metrics.get(self.curve_name, math.nan)
        if math.isfinite(value):
            self.curve_points.append((step, value))

    def estimate_seconds_left(self, elapsed: float) -> float | None:
        """Estimate the remaining time from the last iterations, or from the phase if there are no iterations. None
        before two iterations have ended: the first one also includes the start of the workers."""
        if self.total_steps:
            steps_left = self.total_steps - self.step
            if not (self.costs and self.last_end and steps_left > 0):
                return None
            return estimate_seconds_left(self.costs, steps_left, self.tokens, elapsed - self.last_end[0])
        phase = self.running_phase
        if phase is None or phase.done <= phase.done_before:
            return None
        done = phase.done - phase.done_before + phase.in_flight / 2
        left = (elapsed - phase.since) / done * (phase.total - phase.done_before - done)
        return max(0.0, left)

    def format_time_left(self, elapsed: float) -> str:
        """Format the remaining time; empty if it is unknown."""
        left = self.estimate_seconds_left(elapsed)
        return "" if left is None else f"{format_duration(left)} left"

    def format_status(self, elapsed: float) -> str:
        """Format a status line, e.g. ` 1:05  generate 120/256`."""
        parts, phase = [self.activity], self.running_phase
        if phase:
            left = "" if self.total_steps else self.format_time_left(elapsed)
            parts = [f"{phase.name} {phase.done}/{phase.total}", phase.text, left]
        return f"{format_duration(elapsed):>5}  {'   '.join(filter(None, parts))}"


def compute_expected_tokens(costs: Sequence[StepCost]) -> float:
    """Return the tokens that the next iteration samples: as many as the newest ones."""
    newest = list(costs)[-NEWEST_STEPS:]
    return sum(cost.tokens for cost in newest) / max(1, sum(cost.steps for cost in newest))


def estimate_seconds_left(costs: Sequence[StepCost], steps_left: int, tokens: int, seconds: float) -> float:
    """Estimate the remaining time of a run from the seconds per sampled token of its last iterations.

    costs: of the last iterations, oldest first, at least one. steps_left: with the running iteration, in which `tokens`
    were sampled in `seconds` so far. Without sampled tokens, all iterations count the same.

    >>> costs = [StepCost(1, 30.0, 10.0, 100.0), StepCost(1, 50.0, 10.0, 200.0)]  # 10 s + 0.2 s per token
    >>> estimate_seconds_left(costs[1:], 2, 300, 5.0)
    115.0
    """
    steps, sampled = sum(cost.steps for cost in costs), sum(cost.tokens for cost in costs)
    fixed, total = sum(cost.fixed_seconds for cost in costs), sum(cost.seconds for cost in costs)
    expected = compute_expected_tokens(costs) if sampled else 1.0
    per_token = (total - fixed) / (sampled or steps)
    running = fixed / steps + per_token * max(expected, tokens if sampled else 0)
    return max(0.0, running + (steps_left - 1) * (fixed / steps + per_token * expected) - seconds)


def choose_headline(metrics: Container[str]) -> tuple[str, ...]:
    """Return the metrics that say most about a run, of those that it logs: first the one that it optimizes.

    >>> choose_headline({"critic/score/mean": 0.0, "distill/divergence": 0.1})
    ('distill/divergence',)
    """
    chosen = next((names for names in HEADLINES if names[0] in metrics), ())
    return tuple(name for name in chosen if name in metrics)


def render_view(view: RunView, elapsed: float, width: int, height: int) -> list[Text]:
    """Lay out the live view as lines that fit the window. If it is small, parts are left out: first blank lines, then
    the sample, the curve, metrics, warnings, the phase, and the title."""
    rows = format_metric_rows(view.last_metrics)
    label, first, answer = view.sample or ("", "", "")
    parts = [  # rank, lines
        (1, [Text(view.title, "bold")]),
        (0, [_make_run_line(view, elapsed, width)]),
        (2, [_make_phase_line(view, width)]),
        (5, _make_curve(view, width)),
        (4, [_make_line(name, Text(text)) for name, text in rows.items()]),
        (6, [_make_line(label, Text(first)), _make_line("", Text(answer))] if view.sample else []),
        (3, [_make_line("warning", Text(text), "yellow") for text in view.warnings]),
    ]
    parts = [part for part in parts if part[1]]
    spaced = [line for rank, lines in parts for line in ([Text(), *lines] if rank > 3 else lines)]
    while sum(len(lines) for _, lines in parts) > height and len(parts) > 1:
        parts.remove(max(parts, key=lambda part: part[0]))
    shown = spaced if len(spaced) <= height else [line for _, lines in parts for line in lines]
    for line in shown:
        line.truncate(width, overflow="ellipsis")
    return shown


def _make_line(label: str, content: Text, style: str = "bold") -> Text:
    return Text.assemble((f"{label:<{LABEL_WIDTH - 1}} ", style), content)


def _make_bar(done: int, total: int, width: int) -> Text:
    """Return a bar, which is readable without colors, and done/total; in a narrow window only done/total."""
    bar, filled = Text(), round(BAR_WIDTH * min(1.0, done / total))
    if width >= MIN_WIDTH_WITH_BARS:
        bar.append("━" * filled, "cyan").append("─" * (BAR_WIDTH - filled) + "  ", "dim")
    return bar.append(f"{done}/{total}")


def _make_run_line(view: RunView, elapsed: float, width: int) -> Text:
    times = ", ".join(filter(None, [format_duration(elapsed), view.format_time_left(elapsed)]))
    if not view.total_steps:
        return _make_line("time", Text(times))
    return _make_line("step", _make_bar(view.step, view.total_steps, width).append(f" in {times}", "dim"))


def _make_phase_line(view: RunView, width: int) -> Text:
    if not (phase := view.running_phase):
        name, _, detail = view.activity.partition(": ")
        return _make_line(name, Text(detail, "dim"))
    return _make_line(phase.name, _make_bar(phase.done, phase.total, width).append(f"   {phase.text}", "dim"))


def _make_curve(view: RunView, width: int) -> list[Text]:
    points = view.curve_points
    if len(points) < 2:
        return []
    shown = {view.curve_name: [*points[:: len(points) // CURVE_POINTS + 1], points[-1]]}
    curve = plot_curves(shown, min(width - 1, CURVE_WIDTH), CURVE_HEIGHT)
    return [_make_line(view.curve_name, Text(f" {points[-1][1]:.3f}")), *curve.split("\n")]


def format_metric_rows(metrics: Mapping[str, float]) -> dict[str, str]:
    """Format the metrics of each row: `{"train": "reward 0.531   length 41.0", "speed": "7,400 tokens/s"}`."""
    rows = {
        row: "   ".join(
            shape.format(metrics[name])
            for name, shape in shapes.items()
            if name in metrics and not _is_hidden(row, name, metrics)
        )
        for row, shapes in SHOWN_METRICS.items()
    }
    return {row: text for row, text in rows.items() if text}


def _is_hidden(row: str, name: str, metrics: Mapping[str, float]) -> bool:
    if name in ("critic/score/mean", "reward/accuracy"):
        return metrics[name] == 0 and "distill/reverse_kl" in metrics  # distillation without rewards
    other = {"distill/reverse_kl": "distill/divergence", "val/reward": "val/accuracy"}.get(name)
    return (row == "lost" and metrics[name] <= 0) or other in metrics


def format_plain_line(view: RunView, metrics: Mapping[str, float], elapsed: float) -> str:
    """Format the metrics of an iteration on one line.

    Example: `step  12/80   reward 0.531   val: accuracy 0.643   7,400 tokens/s   1:32 left`.
    """
    rows = format_metric_rows(metrics)
    if "val" in rows:
        rows["val"] = f"val: {rows['val']}"
    if view.step == 0:  # the time of the start is not that of a step
        rows.pop("speed", None)
    head = f"step {view.step:>{len(str(view.total_steps))}}" + f"/{view.total_steps}" * bool(view.total_steps)
    return "   ".join(filter(None, [head, *rows.values(), view.format_time_left(elapsed)]))


def format_time_summary(seconds: Mapping[str, float]) -> str:
    """Format the sums of the timing metrics of a run, e.g. `time: generate 75%, update 25% of 4.0 s`; empty if none."""
    phases = {name.removeprefix("timing/"): spent for name, spent in seconds.items() if name != "timing/step"}
    total = sum(phases.values())
    longest_first = sorted(phases.items(), key=lambda item: -item[1])
    shown = [f"{phase} {spent / total:.0%}" for phase, spent in longest_first if spent >= 0.005 * total > 0]
    return f"time: {', '.join(shown)} of {total:,.1f} s (docs/replay.md)" if shown else ""


def format_duration(seconds: float) -> str:
    """Format seconds as `0:07`, `12:30` or `1:05:00`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
