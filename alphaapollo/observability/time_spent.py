"""Summarize the time of a run: the share of each phase."""

from __future__ import annotations

from collections.abc import Mapping

PREFIX = "timing/"


def format_time_summary(seconds: Mapping[str, float], resumed_step: int) -> str:
    """Return the line to print at the end of the run; empty if no iteration ran.

    seconds: sum of each timing metric over the iterations. resumed_step: 0 for a new run.
    """
    phases = {name.removeprefix(PREFIX): spent for name, spent in seconds.items() if name != f"{PREFIX}step"}
    total = sum(phases.values())
    longest_first = sorted(phases.items(), key=lambda item: -item[1])
    shown = [f"{phase} {spent / total:.0%}" for phase, spent in longest_first if spent >= 0.005 * total > 0]
    since = f" since the resume after step {resumed_step}" if resumed_step else ""
    return f"time{since}: {', '.join(shown)} of {total:,.1f} s (docs/profiles.md)" if shown else ""
