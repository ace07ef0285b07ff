"""A process that is stopped is named, told of once, and ends the run with its stacks, not a hang."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from tests.loop.conftest import Runner, processes_of
from tests.loop.warm import Program

pytestmark = [pytest.mark.loop, pytest.mark.timeout(300)]

# A busy machine may hold a healthy run up for the notice, which does no harm; for the end somebody must be stopped.
WATCHED = (
    "trainer.total_training_steps=100000",
    "trainer.val_before_train=False",
    "trainer.save_freq=-1",
    "trainer.stall_notice=2",
    "trainer.stall_timeout=5",
)


def started(ppo: Runner, *overrides: str) -> Program:
    """A run in the middle of its iterations."""
    program = ppo.start(*WATCHED, *overrides)
    metrics = ppo.out / "test/run/metrics.jsonl"
    end = time.monotonic() + 150
    while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 2):
        assert program.wait(0.05) is None, program.printed[-4000:]
        assert time.monotonic() < end, "the run does not get going"
    return program


def process_with(ppo: Runner, words: str) -> int:
    (pid,) = [pid for pid, line in processes_of(ppo).items() if words in line]
    return pid


@pytest.mark.parametrize(
    ("controller", "words", "engine", "named"),
    [
        ("ray", "PolicyHost", "fake", "the policy worker of rank 0 (pid {})"),
        ("ray", "RolloutHost", "fake", "the rollout worker of rank 0 (pid {})"),
        ("ray", "EngineCore", "vllm", "the engine core of rollout worker 0 (pid {})"),
        ("local", "EngineCore", "vllm", "the engine core of rollout worker 0 (pid {})"),
    ],
)
def test_who_is_stopped_is_named(
    ppo: Runner, controller: str, words: str, engine: str, named: str, leaves_nothing: Callable[[], None]
) -> None:
    program = started(ppo, f"trainer.controller={controller}", f"actor_rollout_ref.rollout.name={engine}")
    pid = process_with(ppo, words)
    os.kill(pid, signal.SIGSTOP)
    done = ppo.finish(program, deadline=120)
    stopped = f"{named.format(pid)} is stopped"
    assert done.code == 1, done.output[-3000:]
    notices = [line for line in done.output.splitlines() if line.startswith("note nothing has moved for ")]
    assert stopped in notices[-1], done.output[-3000:]
    error = done.output.splitlines()[-1]
    assert error.startswith("error: nothing has moved for ") and stopped in error, done.output[-3000:]
    assert "begins anew" in error and "Traceback" not in done.output
    (stacks,) = (done.folder / "stalls").iterdir()
    assert str(stacks) in error
    text = stacks.read_text()
    assert f"--- process {pid}\n" in text and stopped in text
    assert "stall_watch.py" in text  # the controller's own
    leaves_nothing()
