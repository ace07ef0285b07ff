"""What the console knows about a run, and its layout: the live view, and lines of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from alphaapollo.observability.metric_texts import format_duration, format_metric_rows

RECENT_STEPS = 20  # iterations from which the remaining time is estimated
NEWEST_STEPS = 3  # iterations whose mean number of tokens is expected in the next ones
SHOWN_WARNINGS = 3
FIXED_PHASES = ("validate", "publish", "checkpoint", "evaluate", "save")  # their time does not depend on sampled tokens


@dataclass
class Phase:
    """Part of an iteration whose progress is counted, e.g. `generate` with 12 of 32 groups."""

    name: str
    total: int
    since: float  # elapsed seconds when the phase began
    done_before: int  # units done when the phase began, e.g. before a resume
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
class ConsoleView:
    """State of a run that the console shows. Times are seconds since the console was opened (`elapsed`).

    A thread reads it while the run changes it, so lists are replaced, and never changed.
    """

    title: str = ""
    total_steps: int = 0  # 0: not known yet, or the command has no iterations
    step: int = 0  # completed iterations
    activity: str = "start"  # e.g. `update: policy 0`
    phase: Phase | None = None
    last_metrics: dict[str, float] = field(default_factory=dict)  # last value of each metric
    sample: tuple[str, str, str] | None = None  # label, reward and prompt, answer
    warnings: list[str] = field(default_factory=list)  # the newest SHOWN_WARNINGS
    last_end: tuple[float, int] | None = None  # time and number of the last completed iteration
    costs: list[StepCost] = field(default_factory=list)  # of the newest RECENT_STEPS
    tokens: int = 0  # sampled in the finished groups of the running iteration

    @property
    def running_phase(self) -> Phase | None:
        phase = self.phase  # read once, because another thread may replace it
        return phase if phase and phase.done < phase.total else None

    def update(self, step: int, metrics: Mapping[str, float], elapsed: float) -> None:
        """Add the metrics of an iteration."""
        last_elapsed, last_step = self.last_end or (0.0, step)
        if step > last_step:
            fixed = sum(metrics.get(f"timing/{phase}", 0.0) for phase in FIXED_PHASES)
            cost = StepCost(step - last_step, elapsed - last_elapsed, fixed, metrics.get("rollout/tokens", 0.0))
            self.costs = [*self.costs, cost][-RECENT_STEPS:]
        self.step, self.phase, self.last_end, self.tokens = step, None, (elapsed, step), 0
        self.last_metrics = {**self.last_metrics, **metrics}

    def add_warning(self, text: str) -> None:
        self.warnings = [*self.warnings, text][-SHOWN_WARNINGS:]

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
            left = "" if self.total_steps else self.format_time_left(elapsed)  # else it is that of the run
            parts = [f"{phase.name} {phase.done}/{phase.total}", phase.text, left]
        return f"{format_duration(elapsed):>5}  {'   '.join(filter(None, parts))}"


def compute_expected_tokens(costs: Sequence[StepCost]) -> float:
    """Estimate the number of tokens that the next iteration samples: the mean per iteration of the newest costs."""
    newest = costs[-NEWEST_STEPS:]
    return sum(cost.tokens for cost in newest) / max(1, sum(cost.steps for cost in newest))


def estimate_seconds_left(costs: Sequence[StepCost], steps_left: int, tokens: int, seconds: float) -> float:
    """Estimate the remaining time of a run from the seconds per sampled token of its last iterations.

    costs: of the last iterations, oldest first, at least one. steps_left: includes the running iteration, in which
    `tokens` were sampled in `seconds` so far. Without sampled tokens, all iterations count the same.

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


def render_view(view: ConsoleView, elapsed: float) -> Group:
    """Lay out the live view: the title, and a table with a label in each row."""
    table = Table.grid(Column(style="bold", min_width=11, no_wrap=True), Column(no_wrap=True), padding=(0, 1, 0, 0))
    times = ", ".join(filter(None, [format_duration(elapsed), view.format_time_left(elapsed)]))
    if view.total_steps:
        table.add_row("step", _make_bar(view.step, view.total_steps, f"in {times}"))
    else:
        table.add_row("time", times)
    if phase := view.running_phase:
        table.add_row(phase.name, _make_bar(phase.done, phase.total, phase.text))
    else:
        name, _, detail = view.activity.partition(": ")
        table.add_row(Text(name), Text(detail, "dim"))
    for name, text in format_metric_rows(view.last_metrics).items():
        table.add_row(name, text)
    label, question, answer = view.sample or ("", "", "")
    if label:
        table.add_row(label, Text(question))
        table.add_row("", Text(answer))
    for warning in view.warnings:
        table.add_row(Text("warning", "yellow"), Text(warning))
    return Group(Text(view.title, "bold", no_wrap=True, overflow="ellipsis"), table)


def _make_bar(done: int, total: int, text: str) -> Table:
    row = Table.grid(Column(), Column(no_wrap=True), padding=(0, 1, 0, 0))
    row.add_row(ProgressBar(total, done, width=24), Text.assemble(f"{done}/{total} ", (text, "dim")))
    return row


def format_plain_line(view: ConsoleView, metrics: Mapping[str, float], elapsed: float) -> str:
    """Format the metrics of an iteration on one line.

    Example: `step  12/80   reward 0.531   val: accuracy 0.643   7,400 tokens/s   1:32 left`.
    """
    rows = format_metric_rows(metrics)
    if "val" in rows:
        rows["val"] = f"val: {rows['val']}"
    if view.step == 0:  # the time of the start is not that of a step
        rows.pop("speed", None)
    head = f"step {view.step:>{len(str(view.total_steps))}}" + (f"/{view.total_steps}" if view.total_steps else "")
    return "   ".join(filter(None, [head, *rows.values(), view.format_time_left(elapsed)]))
