"""However a run ends, nothing of it is left: no process, no shared-memory file; and what failed is named."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.loop.conftest import Runner, processes_of
from tests.loop.warm import Program

pytestmark = [pytest.mark.loop, pytest.mark.timeout(300)]

ENDLESS = ("trainer.total_training_steps=100000", "trainer.val_before_train=False", "trainer.save_freq=-1")


def started(ppo: Runner, *overrides: str) -> Program:
    """A run in the middle of its iterations."""
    program = ppo.start(*ENDLESS, *overrides)
    metrics = ppo.out / "test/run/metrics.jsonl"
    end = time.monotonic() + 150
    while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 3):
        assert program.wait(0.05) is None, program.printed[-4000:]
        assert time.monotonic() < end, "the run does not get going"
    return program


def child(ppo: Runner, words: str) -> int:
    """The pid of the one process of the run whose command line has the words."""
    (pid,) = [pid for pid, line in processes_of(ppo).items() if words in line]
    return pid


def test_interrupt(ppo: Runner, leaves_nothing: Callable[[], None]) -> None:
    program = started(ppo)
    program.signal(signal.SIGINT)
    done = ppo.finish(program, deadline=60)
    assert done.code == 130
    assert "interrupted" in done.output and "Traceback" not in done.output, done.output[-3000:]
    leaves_nothing()


def test_kill_of_the_driver(ppo: Runner, leaves_nothing: Callable[[], None]) -> None:
    program = started(ppo)
    lines = " ".join(processes_of(ppo).values())
    assert "DashboardAgent" in lines and "raylet" in lines  # Ray renames some: they must still be told as the run's
    program.signal(signal.SIGKILL)
    program.wait()
    leaves_nothing()


@pytest.mark.parametrize(
    ("words", "engine", "named"),
    [("PolicyHost", "fake", "policy"), ("EngineCore", "vllm", "engine"), ("RolloutHost", "vllm", "rollout")],
)
def test_kill_of_a_worker_is_named(
    ppo: Runner, words: str, engine: str, named: str, leaves_nothing: Callable[[], None]
) -> None:
    program = started(ppo, f"actor_rollout_ref.rollout.name={engine}")
    os.kill(child(ppo, words), signal.SIGKILL)
    done = ppo.finish(program, deadline=120)
    assert done.code == 1
    assert named in done.output.splitlines()[-1], done.output[-3000:]
    assert "Traceback" not in done.output, done.output[-3000:]
    leaves_nothing()


def test_full_disk_while_saving_keeps_the_last_whole_checkpoint(ppo: Runner, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=7m", "none", str(small)], check=False)
    if mounted.returncode:
        pytest.skip("needs root to mount a small disk")
    try:
        done = ppo.finish(
            ppo.start(
                "trainer.controller=local",
                "actor_rollout_ref.rollout.name=fake",
                "trainer.save_freq=1",
                "trainer.max_ckpt_to_keep=null",
                f"trainer.output_dir={small}",
                "trainer.total_training_steps=20",
                "trainer.val_before_train=False",
            )
        )
        assert done.code == 1
        assert "error:" in done.output and "free there" in done.output, done.output[-3000:]
        assert str(small) in done.output
        whole = sorted((small / "test/run/checkpoints").glob("step_*/progress.json"))
        assert whole
    finally:
        subprocess.run(["umount", str(small)], check=True)
