"""Summarize the time of a run: the share of each phase."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

PREFIX = "timing/"


class TimeSummary:
    """Summary of the time that this process spends in each phase of a run (generate, update, ...)."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def add(self, metrics: Mapping[str, float]) -> None:
        """Add the timing metrics of one iteration."""
        for name, value in metrics.items():
            if name.startswith(PREFIX) and name != f"{PREFIX}step":
                self.seconds[name.removeprefix(PREFIX)] += value

    def format_line(self, resumed_step: int) -> str:
        """Return the line to print at the end of the run; empty if no iteration ran. resumed_step: 0 for a new run."""
        total = sum(self.seconds.values())
        longest_first = sorted(self.seconds.items(), key=lambda item: -item[1])
        shown = [f"{phase} {spent / total:.0%}" for phase, spent in longest_first if spent >= 0.005 * total > 0]
        since = f" since the resume after step {resumed_step}" if resumed_step else ""
        return f"time{since}: {', '.join(shown)} of {total:,.1f} s (docs/profiles.md)" if shown else ""
