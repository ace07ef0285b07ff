"""Console output of a command: a live view in a terminal, otherwise one line per iteration and status lines.

open, before large packages are imported -> start -> show_phase, show_samples, show_step, ... -> show_end -> close

A thread redraws the live view or, if nothing was printed for a while, prints a status line. It also writes status.json
for the viewer. Errors of the display never affect the run.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from rich.live import Live
from rich.text import Text

from alphaapollo.observability.advice import MetricsAdvisor
from alphaapollo.observability.console_view import (
    ConsoleView,
    Phase,
    compute_expected_tokens,
    format_plain_line,
    render_view,
)
from alphaapollo.observability.metric_texts import format_time_summary
from alphaapollo.observability.terminal import Terminal, choose_samples, get_last_message, shorten_text
from alphaapollo.runs.run_status import STATUS, RunStatus, write_run_status
from alphaapollo.types import Trajectory, TrajectoryGroup
from alphaapollo.utils.heartbeat import HEARTBEAT
from alphaapollo.utils.redaction import redact

REFRESH_SECONDS = 0.25
STATUS_SECONDS = 2.0  # between two writes of status.json
QUIET_SECONDS = 3.0  # without output before a status line, which then appears within 5 seconds
PROMPT_CHARS, ANSWER_CHARS = 100, 200  # longer texts of samples are shortened


class Console(AbstractContextManager["Console"]):
    """Console output of one command. Without `open`, it has no thread and no live view."""

    def __init__(self, terminal: Terminal | None = None):
        self.terminal = terminal or Terminal(highlight=False, soft_wrap=True)
        self.num_warnings = 0
        self.shows_status_lines = True  # without a live view; False while other output is expected
        self.resumed_step: int | None = None  # None: `start` was not called
        self.status_folder: Path | None = None  # locked run folder in which status.json is written; None: nowhere
        self._status = RunStatus()  # last written status
        self._opened = time.monotonic()
        self._seen_prints, self._quiet_since = 0, self._opened
        self._view = ConsoleView()
        self._advisor = MetricsAdvisor()
        self._phase_seconds: Counter[str] = Counter()  # seconds by timing metric
        self._live: Live | None = None
        self._thread = threading.Thread(target=self._refresh_periodically, name="console", daemon=True)
        self._closing = threading.Event()

    @property
    def elapsed(self) -> float:
        """Return the seconds since the console was created."""
        return time.monotonic() - self._opened

    def open(self, title: str) -> Console:
        """Start the thread and, in a terminal, the live view. title: name of the run."""
        self._view.title = title
        terminal = self.terminal
        if terminal.is_terminal and not terminal.is_dumb_terminal and terminal.encoding.startswith("utf"):
            is_stderr_shown = sys.stderr is not None and sys.stderr.isatty()
            live = Live(console=terminal, auto_refresh=False, redirect_stderr=is_stderr_shown)
            with suppress(OSError):  # closed terminal
                live.start()
                self._live = live
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def start(self, total_steps: int, completed_steps: int) -> None:
        """Start showing the iterations of a run. completed_steps: iterations before a resume."""
        view = self._view
        self._view = ConsoleView(view.title, total_steps, completed_steps, view.activity, warnings=view.warnings)
        self.resumed_step = completed_steps

    def show_phase(self, name: str, done: int, total: int, text: str = "", in_flight: int = 0) -> None:
        """Show the progress of a phase, e.g. `generate`, as done/total, followed by `text`. in_flight: see Phase."""
        phase = self._view.phase
        if phase is None or (phase.name, phase.total) != (name, total) or done < phase.done:
            phase = self._view.phase = Phase(name, total, self.elapsed, done)
        phase.done, phase.text, phase.in_flight = done, text, in_flight

    def count_tokens(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Count the tokens of groups that have finished in the running iteration."""
        self._view.tokens += sum(trajectory.num_tokens for group in groups for trajectory in group.trajectories)

    def show_step(self, step: int, metrics: Mapping[str, float], failure_reason: str = "") -> None:
        """Show the metrics of a finished iteration. `failure_reason`: why a trajectory of the iteration failed."""
        self._view.update(step, metrics, self.elapsed)
        self._phase_seconds.update({name: value for name, value in metrics.items() if name.startswith("timing/")})
        if self._live is None:
            self.show_line(format_plain_line(self._view, metrics, self.elapsed))
        for advice in self._advisor.list_warnings(step, metrics, failure_reason):
            self.warn(advice)

    def show_samples(self, groups: Sequence[TrajectoryGroup], is_validation: bool = False) -> None:
        """Show a sample with the median reward in the live view. Without a live view, print a bad, a median and a good
        sample of a validation."""
        if self._live is None and not is_validation:
            return
        samples = [(sample.reward, *shorten_sample(group, sample)) for group, sample in choose_samples(groups)]
        if samples:
            reward, prompt, answer = samples[len(samples) // 2]
            label = "val sample" if is_validation else "sample"
            self._view.sample = label, f"reward {reward:.3f}   {prompt}", answer
        if self._live is None:
            for reward, prompt, answer in samples:
                self.show_line(f"val sample: reward {reward:.3f}   prompt: {prompt}   answer: {answer}")

    def show_line(self, text: Text | str) -> None:
        """Print a line as it is, above the live view if there is one."""
        with suppress(OSError):  # closed terminal or full disk; the run continues
            self.terminal.print(text, soft_wrap=True, markup=False)

    def notify(self, text: str) -> None:
        """Print a line that starts with `note`."""
        self.show_line(Text.assemble(("note ", "yellow"), redact(text)))

    def warn(self, text: str) -> None:
        """Print a note, and keep it in the live view until newer warnings replace it."""
        self.num_warnings += 1
        self._view.add_warning(shorten_text(" ".join(text.split()), ANSWER_CHARS))
        self.notify(text)

    def show_end(self, lines: Sequence[str]) -> None:
        """End the live view and print how much time each phase took, then the lines."""
        self.end_live_view()
        times = format_time_summary(self._phase_seconds)
        for line in [*filter(None, [times]), *lines]:
            self.show_line(line)

    def end_live_view(self) -> None:
        """End the live view; its last state stays on the screen. Until `close`, there are status lines instead."""
        if self._live is not None:
            self._refresh_safely()
            live, self._live = self._live, None
            with suppress(OSError):
                live.stop()

    def close(self) -> None:
        """End the live view and the thread."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        if self.status_folder:
            with suppress(OSError):
                (self.status_folder / STATUS).unlink(missing_ok=True)
        self.end_live_view()

    def refresh(self) -> None:
        """Write the status, and redraw the live view or, after QUIET_SECONDS without output, print a status line."""
        live, terminal, elapsed = self._live, self.terminal, self.elapsed
        self._view.activity = find_activity() or self._view.activity
        with suppress(OSError):  # removed folder or full disk, which the command itself reports
            self._write_status()
        if live is not None:
            live.update(render_view(self._view, elapsed), refresh=True)
        elif terminal.num_prints != self._seen_prints or not self.shows_status_lines:
            self._seen_prints, self._quiet_since = terminal.num_prints, time.monotonic()
        elif time.monotonic() - self._quiet_since >= QUIET_SECONDS:
            self.show_line(self._view.format_status(elapsed))

    def _refresh_periodically(self) -> None:
        while not self._closing.wait(REFRESH_SECONDS) and self._refresh_safely():
            pass

    def _write_status(self) -> None:
        """Write what the command does to its run folder, at most every STATUS_SECONDS."""
        view, previous = self._view, self._status
        if self.status_folder is None or (now := time.time()) - previous.written < STATUS_SECONDS:
            return
        name, _, detail = view.activity.partition(": ")
        if phase := view.running_phase:
            name, detail = phase.name, f"{phase.done}/{phase.total}"
        self._status = RunStatus(
            phase=name,
            detail=detail,
            since=previous.since if (name, view.step) == (previous.phase, previous.step) else now,
            written=now,
            step=view.step,
            tokens=view.tokens,
            expected_tokens=compute_expected_tokens(view.costs),
            seconds_left=view.estimate_seconds_left(self.elapsed),
            pid=os.getpid(),
        )
        write_run_status(self.status_folder, self._status)

    def _refresh_safely(self) -> bool:
        """Refresh, and return whether to refresh again later."""
        try:
            self.refresh()
        except OSError:  # closed terminal; status.json is still written
            return self.status_folder is not None
        except Exception as error:  # noqa: BLE001  the run continues
            trace = "".join(traceback.format_exception(error))
            self.notify(f"the console failed, which is a bug; the run continues:\n{trace}")
            return False
        return True


def shorten_sample(group: TrajectoryGroup, sample: Trajectory) -> tuple[str, str]:
    """Return prompt and answer of a sample, each on one line, shortened and without control characters."""
    question = get_last_message(group.prompt.content if sample.first_observation is None else sample.first_observation)
    prompt = shorten_text(" ".join(question.split()), PROMPT_CHARS)
    words = (word for turn in sample.turns for word in (turn.raw_text or turn.text).split())
    return prompt, shorten_text(" ".join(words), ANSWER_CHARS)


def find_activity() -> str:
    """Return the oldest operation in progress and a detail, e.g. `update: policy 0, policy 1`; empty if none is
    known. The detail is the called workers, else the next operation."""
    calls = HEARTBEAT.list_active_calls()
    names = [call.name.replace("_", " ") for call in sorted(calls, key=lambda call: call.worker != "")]  # driver first
    details = list(dict.fromkeys(call.worker for call in calls if call.worker)) or names[1:2]
    shown_details = details if len(details) <= 3 else [*details[:3], "..."]
    return ": ".join(filter(None, [*names[:1], ", ".join(shown_details)]))
