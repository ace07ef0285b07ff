"""Recorded durations of tests (`make durations`) stay within limits. No test fails because a machine is slow."""

from __future__ import annotations

import json

from tests.conftest import DURATIONS, HERE

COMPLETE_RUN, OTHER = 120.0, 30.0  # limits in seconds of a test without the marker `nightly`


def test_no_test_takes_long_and_every_recorded_file_exists() -> None:
    for name, seconds in json.loads(DURATIONS.read_text(encoding="utf-8")).items():
        file = name.partition("::")[0]
        assert (HERE.parent / file).is_file(), f"{file} is gone: run make durations"
        assert seconds <= (COMPLETE_RUN if "/loop/" in file or "/simulated_gpu/" in file else OTHER), name
