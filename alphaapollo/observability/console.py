"""What one sees of a run: a live view in a terminal, one line an iteration everywhere else.

The loop calls start, phase, step and notice; nothing that goes wrong with the display reaches it.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from alphaapollo.observability.advice import Advisor
from alphaapollo.observability.curve import draw
from alphaapollo.observability.terminal import Terminal
from alphaapollo.observability.time_spent import TimeSpent
from alphaapollo.utils.redaction import redacted

CURVES = ("reward/accuracy", "reward/mean", "train/loss")  # the first of them that a run has is drawn
FIGURES = {  # row -> how each figure is shown: those that a run has
    "train": {
        "reward/mean": "reward {:.3f}",
        "reward/accuracy": "accuracy {:.3f}",
        "train/loss": "loss {:.4f}",
        "response/length_mean": "length {:,.1f}",
    },
    "val": {
        "val/accuracy": "accuracy {:.3f}",
        "val/accuracy_greedy": "greedy {:.3f}",
        "val/loss": "loss {:.4f}",
    },
    "lost": {  # shown where they are not 0
        "outcome/failed": "failed {:.0%}",
        "response/truncated": "truncated {:.0%}",
        "end/time_limit": "timed out {:.0%}",
        "val/failed": "failed in validation {:.0%}",
    },
    "speed": {
        "rollout/tokens_per_second": "{:,.0f} tokens/s",
        "timing/step": "{:.2f} s a step",
    },
}
RECENT_STEPS = 20  # the time that is left is judged by these
BAR_WIDTH = 30
CURVE_WIDTH, CURVE_HEIGHT = 76, 6


@dataclass
class View:
    """All that is shown."""

    total_steps: int = 0
    done: int = 0
    phases: dict[str, tuple[int, int]] = field(default_factory=dict)  # of the iteration at hand: done, total
    figures: dict[str, float] = field(default_factory=dict)  # the last value of every metric
    curve: list[tuple[float, float]] = field(default_factory=list)
    durations: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))

    @property
    def curve_name(self) -> str:
        """The metric that is drawn."""
        return next((name for name in CURVES if name in self.figures), "")

    def seconds_left(self) -> float | None:
        """Judged by the last iterations; None before the first."""
        if not self.durations:
            return None
        return sum(self.durations) / len(self.durations) * (self.total_steps - self.done)

    def take(self, step: int, metrics: Mapping[str, float]) -> None:
        """Note the metrics of an iteration."""
        self.done = step
        self.figures |= metrics
        value = metrics.get(self.curve_name, math.nan)
        if math.isfinite(value):
            self.curve.append((step, value))


class Console:
    """The display of one run."""

    def __init__(self, terminal: Terminal | None = None):
        self._terminal = terminal or Terminal(highlight=False)
        self._view = View()
        self._advisor = Advisor()
        self._spent = TimeSpent()
        self._live: Live | None = None
        self._start = time.monotonic()
        self._last: float | None = None  # when the last iteration ended

    def start(self, total_steps: int, done: int) -> None:
        """Open the display. done: iterations that an earlier process has made."""
        self._view = View(total_steps, done)
        self._start, self._last = time.monotonic(), None
        able = not self._terminal.is_dumb_terminal and self._terminal.encoding.startswith("utf")
        if self._terminal.is_terminal and able:
            self._live = Live(console=self._terminal, get_renderable=self._render, refresh_per_second=4)
            self._live.start()

    def phase(self, name: str, done: int, total: int) -> None:
        """Progress of a phase of the iteration at hand. Without a terminal, the first line of an iteration may take
        minutes: until then, each phase is said as it begins."""
        if self._live is None and self._last is None and name not in self._view.phases:
            self._print(f"{clock(time.monotonic() - self._start):>5}  {name} ...")
        self._view.phases[name] = (done, total)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """An iteration has ended."""
        now = time.monotonic()
        if self._last is not None and step > self._view.done:  # the first one includes the start of the workers
            self._view.durations.append((now - self._last) / (step - self._view.done))
        self._last = now
        self._view.take(step, metrics)
        self._spent.add(metrics)
        self._view.phases.clear()
        if self._live is None:
            self._print(plain_line(self._view, metrics))
        for advice in self._advisor.look(step, metrics):
            self.notice(advice)

    def notice(self, text: str) -> None:
        """Say something that stays: above the live view, or on a line of its own."""
        self._print(Text.assemble(("note ", "yellow"), redacted(text)))

    def where_time_went(self) -> None:
        """The last lines of a run that has come to its end."""
        for line in self._spent.lines():
            self._print(line)

    def close(self) -> None:
        """Leave the last view standing."""
        if self._live is not None:
            with suppress(OSError):
                self._live.stop()
            self._live = None

    def _print(self, text: Text | str) -> None:
        with suppress(OSError):  # a terminal that is gone, a full disk behind the pipe: the run goes on
            self._terminal.print(text, soft_wrap=True)

    def _render(self) -> Group:
        return render(self._view, time.monotonic() - self._start, self._terminal.width)


def render(view: View, elapsed: float, width: int) -> Group:
    """The live view: bars, the curve, the last figures."""
    parts: list[Table | Text] = [_bars(view, elapsed)]
    if len(view.curve) > 1:
        curve = draw({view.curve_name: view.curve}, min(width - 1, CURVE_WIDTH), CURVE_HEIGHT)
        parts += [Text(f"\n{view.curve_name}", "bold"), curve]
    if rows := figure_rows(view.figures):
        table = Table.grid(padding=(0, 2))
        table.add_column(min_width=8)
        for name, text in rows.items():
            table.add_row(Text(name, "bold"), text)
        parts += [Text(), table]
    return Group(*parts)


def _bars(view: View, elapsed: float) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=8)
    table.add_column(width=BAR_WIDTH)
    table.add_column()
    ended = view.done >= view.total_steps
    left = "" if ended else f", {clock(view.seconds_left())} left"
    table.add_row(
        Text("run", "bold"),
        ProgressBar(total=max(view.total_steps, 1), completed=view.done, width=BAR_WIDTH),
        Text.assemble(f"{view.done}/{view.total_steps} steps", (f"   {clock(elapsed)} gone{left}", "dim")),
    )
    phases = {} if ended and not view.phases else {"generate": (0, 0), "update": (0, 0)} | view.phases
    for name, (done, total) in phases.items():
        running = done < total
        bar = ProgressBar(total=max(total, 1), completed=done, width=BAR_WIDTH, pulse=running and total == 1)
        state = f"{done}/{total}" if total > 1 else "running" if running else "done" if total else ""
        table.add_row(Text(name, "bold" if running else "dim"), bar, Text(state, "dim"))
    return table


def figure_rows(figures: Mapping[str, float]) -> dict[str, str]:
    """Rows of the figures that there are: `{"train": "reward 0.531   length 41.0", "speed": "7,400 tokens/s"}`."""
    rows = {
        row: "   ".join(
            shape.format(figures[name])
            for name, shape in shapes.items()
            if name in figures and (row != "lost" or figures[name] > 0)
        )
        for row, shapes in FIGURES.items()
    }
    return {row: text for row, text in rows.items() if text}


def plain_line(view: View, metrics: Mapping[str, float]) -> str:
    """One iteration on one line: `step  12/80   reward 0.531   val: accuracy 0.643   7,400 tokens/s   1:32 left`."""
    rows = figure_rows(metrics)
    if "val" in rows:
        rows["val"] = f"val: {rows['val']}"
    head = f"step {view.done:>{len(str(view.total_steps))}}/{view.total_steps}"
    tail = [f"{clock(view.seconds_left())} left"] if view.durations and view.done < view.total_steps else []
    return "   ".join([head, *rows.values(), *tail])


def clock(seconds: float | None) -> str:
    """`0:07`, `12:30`, `1:05:00`; `?` for None."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
