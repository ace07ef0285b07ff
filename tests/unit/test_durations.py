"""Recorded durations of tests (`make durations`) stay within limits. No test fails because a machine is slow."""

from __future__ import annotations

import json

from tests.conftest import DURATIONS, HERE

LIMITS = {"loop": 120.0, "simulated_gpu": 90.0, "": 30.0}  # seconds of a test without the marker `nightly`, by folder


def test_no_test_takes_long_and_every_recorded_file_exists() -> None:
    recorded: dict[str, float] = json.loads(DURATIONS.read_text(encoding="utf-8"))
    files = {name.partition("::")[0] for name in recorded}
    assert [file for file in files if not (HERE.parent / file).is_file()] == [], "run: make durations"
    slow = {}
    for name, seconds in recorded.items():
        folders = name.partition("::")[0].split("/")
        limit = next(limit for folder, limit in LIMITS.items() if folder in (*folders, ""))
        if seconds > limit:
            slow[name] = seconds
    assert slow == {}
