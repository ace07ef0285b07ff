"""The replay command, and the equality of two runs."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path

import pytest

from alphaapollo.utils.plugins import is_available, load_plugin
from tests.loop.conftest import MARK, ROOT, FinishedRun, Runner
from tests.loop.stack import StackRunner
from tests.loop.warm import Program

REPLAY = "alphaapollo.trainer.replay.__main__"
MEASURED = re.compile(r"(timing|timing_share|memory|perf|checkpoint)/|.*(seconds|per_second|_cached)$")
"""Metrics that differ between equal runs."""


def check_equal_runs(one: FinishedRun, other: FinishedRun) -> None:
    """All metrics of `one` and the exported model are equal bit for bit."""
    for line, same in zip(one.metrics, other.metrics, strict=True):
        differing = [name for name in line if line[name] != same.get(name) and not MEASURED.match(name)]
        assert differing == [], line["step"]
    first, second = ((run.folder / "model/model.safetensors").read_bytes() for run in (one, other))
    assert first == second


def replay(ppo: Runner, *words: object) -> FinishedRun:
    """Run the replay command, on the stack or forked from the warm process."""
    if not is_available("commands", "replay"):
        pytest.skip("the plug-in with the replay command is missing")
    if isinstance(ppo, StackRunner):
        return ppo.call(REPLAY, words)
    output, environment = ppo.out / f"replay_{len(ppo.programs)}.txt", os.environ | {MARK: str(ppo.out)}
    ppo.programs.append(Program(REPLAY, words, output, environment, ROOT, warm=True))
    return ppo.finish(ppo.programs[-1])


def check_verified(done: FinishedRun, step: int, not_covered: Collection[str] = ()) -> None:
    """The independent reference agrees with a recorded iteration, and knows all quantities but some, and the sampling
    of selected tokens or groups. Nothing is checked if the plug-in with the reference is missing."""
    if not is_available("recorded_updates", "verify"):
        return
    checks = load_plugin("recorded_updates", "verify")(recording(done, step))
    failed = [check for check in checks if not check.passed]
    assert not failed, failed
    others = [check for check in checks if not check.covered and check.quantity != "sampling"]
    assert {check.quantity for check in others} == {*not_covered}, others


def recording(done: FinishedRun, step: int) -> Path:
    return done.folder / "recorded" / f"step_{step:06d}"


def equal_lines(done: FinishedRun) -> int:
    """Number of values that are equal to the last bit. Fails if some differ."""
    assert done.code == 0, done.output
    found = re.search(r"\nbit for bit equal: (\d+) of (\d+)\n", done.output)
    assert found and found[1] == found[2], done.output
    return int(found[1])
