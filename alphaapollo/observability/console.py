"""Console output of a run: a live view in a terminal, otherwise one line per iteration.

The loop calls start, show_phase, show_step and notify. Display errors never affect the run.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from rich.box import SIMPLE
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from alphaapollo.observability.advice import MetricsAdvisor
from alphaapollo.observability.curve import plot_curves
from alphaapollo.observability.samples import choose_samples, get_last_message, shorten_text
from alphaapollo.observability.terminal import Terminal
from alphaapollo.observability.time_spent import PREFIX, format_time_summary
from alphaapollo.types import TrajectoryGroup
from alphaapollo.utils.redaction import redact

CURVES = ("reward/accuracy", "critic/score/mean", "train/loss")  # the first of these metrics that a run logs is plotted
SHOWN_METRICS = {  # row -> {metric: format}; missing metrics are omitted
    "train": {
        "critic/score/mean": "reward {:.3f}",
        "reward/accuracy": "accuracy {:.3f}",
        "train/loss": "loss {:.4f}",
        "response_length/mean": "length {:,.1f}",
    },
    "critic": {"critic/vf_explained_var": "critic: explained variance {:.2f}"},
    "val": {
        "val/accuracy": "accuracy {:.3f}",
        "val/accuracy_greedy": "greedy {:.3f}",
        "val/loss": "loss {:.4f}",
    },
    "lost": {  # shown only if not 0
        "outcome/failed": "failed {:.0%}",
        "response_length/clip_ratio": "truncated {:.0%}",
        "end/time_limit": "timed out {:.0%}",
        "val/failed": "failed in validation {:.0%}",
    },
    "speed": {
        "rollout/tokens_per_second": "{:,.0f} tokens/s",
        "timing/step": "{:.2f} s per step",
    },
}
RECENT_STEPS = 20  # iterations from which the remaining time is estimated
BAR_WIDTH = 30
CURVE_WIDTH, CURVE_HEIGHT = 76, 6
PROMPT_CHARS, ANSWER_CHARS = 100, 200  # longer texts of samples are shortened


@dataclass
class RunView:
    """State of a run that the console shows."""

    total_steps: int = 0
    step: int = 0  # completed iterations
    phase_progress: dict[str, tuple[int, int]] = field(default_factory=dict)  # phase of the iteration -> (done, total)
    last_metrics: dict[str, float] = field(default_factory=dict)  # last value of each metric
    curve_points: list[tuple[float, float]] = field(default_factory=list)
    step_times: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))

    @property
    def curve_name(self) -> str:
        """Return the name of the plotted metric; empty before the first metrics."""
        return next((name for name in CURVES if name in self.last_metrics), "")

    def seconds_left(self) -> float | None:
        """Estimate the remaining seconds from the last iterations. Returns None before the first iteration."""
        if not self.step_times:
            return None
        return sum(self.step_times) / len(self.step_times) * (self.total_steps - self.step)

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of an iteration."""
        self.step = step
        self.last_metrics |= metrics
        value = metrics.get(self.curve_name, math.nan)
        if math.isfinite(value):
            self.curve_points.append((step, value))


class Console:
    """Console output of one run."""

    def __init__(self, terminal: Terminal | None = None):
        self._terminal = terminal or Terminal(highlight=False)
        self._view = RunView()
        self._advisor = MetricsAdvisor()
        self._spent: Counter[str] = Counter()  # seconds by timing metric
        self._live: Live | None = None
        self._start, self._resumed_step = time.monotonic(), 0
        self._last: float | None = None  # end time of the last iteration

    def start(self, total_steps: int, completed_steps: int) -> None:
        """Start the output. total_steps: iterations of the run. completed_steps: those completed before a resume."""
        self._view = RunView(total_steps, completed_steps)
        self._start, self._last, self._resumed_step = time.monotonic(), None, completed_steps
        supported = not self._terminal.is_dumb_terminal and self._terminal.encoding.startswith("utf")
        if self._terminal.is_terminal and supported:
            self._live = Live(console=self._terminal, get_renderable=self._render, refresh_per_second=4)
            self._live.start()

    def show_phase(self, name: str, done: int, total: int) -> None:
        """Show the progress of a phase, e.g. `generate`, as done/total. Without a terminal, print only the names of
        phases, and only until the first iteration ends."""
        if self._live is None and self._last is None and name not in self._view.phase_progress:
            self._print_line(f"{format_duration(time.monotonic() - self._start):>5}  {name} ...")
        self._view.phase_progress[name] = (done, total)

    def show_step(self, step: int, metrics: Mapping[str, float], failure_reason: str = "") -> None:
        """Show the metrics of a finished iteration. `failure_reason`: why a trajectory of the iteration failed."""
        now = time.monotonic()
        if self._last is not None and step > self._view.step:  # the first iteration also includes worker start
            self._view.step_times.append((now - self._last) / (step - self._view.step))
        self._last = now
        self._view.update(step, metrics)
        self._spent.update({name: value for name, value in metrics.items() if name.startswith(PREFIX)})
        self._view.phase_progress.clear()
        if self._live is None:
            self._print_line(format_plain_line(self._view, metrics))
        for advice in self._advisor.list_warnings(step, metrics, failure_reason):
            self.notify(advice)

    def show_samples(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Show a bad, a median and a good sample of a validation: a table in a terminal, otherwise one line each."""
        table = Table("reward", "validation prompt", "answer", box=SIMPLE)
        for group, one in choose_samples(groups):
            asked = get_last_message(group.prompt.content if one.first_observation is None else one.first_observation)
            prompt = shorten_text(" ".join(asked.split()), PROMPT_CHARS)
            answer = shorten_text(" ".join(word for turn in one.turns for word in turn.text.split()), ANSWER_CHARS)
            table.add_row(f"{one.reward:.3f}", Text(prompt), Text(answer))
            if self._live is None:
                self._print_line(Text(f"val sample: reward {one.reward:.3f}   prompt: {prompt}   answer: {answer}"))
        if self._live and table.rows:
            with suppress(OSError):
                self._terminal.print(table)

    def notify(self, text: str) -> None:
        """Print a line that starts with `note`, above the live view if there is one."""
        self._print_line(Text.assemble(("note ", "yellow"), redact(text)))

    def show_time_summary(self) -> None:
        """Print how much time each phase took, at the end of a run."""
        if line := format_time_summary(self._spent, self._resumed_step):
            self._print_line(line)

    def close(self) -> None:
        """Stop the live view. Its last state stays on screen."""
        if self._live is not None:
            with suppress(OSError):
                self._live.stop()
            self._live = None

    def _print_line(self, text: Text | str) -> None:
        with suppress(OSError):  # closed terminal or full disk; the run continues
            self._terminal.print(text, soft_wrap=True)

    def _render(self) -> Group:
        return render_view(self._view, time.monotonic() - self._start, self._terminal.width)


def render_view(view: RunView, elapsed: float, width: int) -> Group:
    """Render the live view: progress bars, curve, last metrics."""
    parts: list[Table | Text] = [_make_progress_bars(view, elapsed)]
    if len(view.curve_points) > 1:
        curve = plot_curves({view.curve_name: view.curve_points}, min(width - 1, CURVE_WIDTH), CURVE_HEIGHT)
        parts += [Text(f"\n{view.curve_name}", "bold"), curve]
    if rows := format_metric_rows(view.last_metrics):
        table = Table.grid(padding=(0, 2))
        table.add_column(min_width=8)
        for name, text in rows.items():
            table.add_row(Text(name, "bold"), text)
        parts += [Text(), table]
    return Group(*parts)


def _make_progress_bars(view: RunView, elapsed: float) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=8)
    table.add_column(width=BAR_WIDTH)
    table.add_column()
    ended = view.step >= view.total_steps
    left = "" if ended else f", {format_duration(view.seconds_left())} left"
    table.add_row(
        Text("run", "bold"),
        ProgressBar(total=max(view.total_steps, 1), completed=view.step, width=BAR_WIDTH),
        Text.assemble(f"{view.step}/{view.total_steps} steps", (f"   {format_duration(elapsed)} elapsed{left}", "dim")),
    )
    phases = {} if ended and not view.phase_progress else {"generate": (0, 0), "update": (0, 0)} | view.phase_progress
    for name, (done, total) in phases.items():
        running = done < total
        bar = ProgressBar(total=max(total, 1), completed=done, width=BAR_WIDTH, pulse=running and total == 1)
        state = f"{done}/{total}" if total > 1 else "running" if running else "done" if total else ""
        table.add_row(Text(name, "bold" if running else "dim"), bar, Text(state, "dim"))
    return table


def format_metric_rows(metrics: Mapping[str, float]) -> dict[str, str]:
    """Format the metrics of each row: `{"train": "reward 0.531   length 41.0", "speed": "7,400 tokens/s"}`."""
    rows = {
        row: "   ".join(
            shape.format(metrics[name])
            for name, shape in shapes.items()
            if name in metrics and (row != "lost" or metrics[name] > 0)
        )
        for row, shapes in SHOWN_METRICS.items()
    }
    return {row: text for row, text in rows.items() if text}


def format_plain_line(view: RunView, metrics: Mapping[str, float]) -> str:
    """Format the metrics of an iteration on one line.

    Example: `step  12/80   reward 0.531   val: accuracy 0.643   7,400 tokens/s   1:32 left`.
    """
    rows = format_metric_rows(metrics)
    if "val" in rows:
        rows["val"] = f"val: {rows['val']}"
    if view.step == 0:  # the time of the start is not that of a step
        rows.pop("speed", None)
    head = f"step {view.step:>{len(str(view.total_steps))}}/{view.total_steps}"
    tail = [f"{format_duration(view.seconds_left())} left"] if view.step_times and view.step < view.total_steps else []
    return "   ".join([head, *rows.values(), *tail])


def format_duration(seconds: float | None) -> str:
    """Format seconds as `0:07`, `12:30` or `1:05:00`; `?` for None."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
