"""A stopped process is named. If it continues, the run continues; otherwise the run ends with stack dumps."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from tests.loop.conftest import DEADLINE, FinishedRun, Runner, child
from tests.loop.warm import Program

PROCESSES = {  # words of the command line -> name in messages
    "EngineCore": "the engine core of rollout worker 0",
    "RolloutActor": "the rollout worker of rank 0",
    "PolicyActor": "the policy worker of rank 0",
}


def start_run(ppo: Runner, *overrides: str) -> Program:
    """Start a run and wait for its first iterations."""
    endless = ("trainer.total_training_steps=100000", "trainer.val_before_train=False", "trainer.save_freq=-1")
    program = ppo.start(*endless, "trainer.max_restarts=0", *overrides)
    wait_until(program, lambda: steps_of(ppo) >= 2, "the run does not get going")
    return program


def steps_of(ppo: Runner) -> int:
    metrics = ppo.out / "test/run/metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def wait_until(program: Program, happens: Callable[[], bool], problem: str) -> None:
    end = time.monotonic() + DEADLINE
    while not happens():
        assert program.wait(0.05) is None, program.printed[-4000:]
        assert time.monotonic() < end, f"{problem}:\n{program.printed[-4000:]}"


def stop(ppo: Runner, words: str) -> str:
    """Stop the only process with these words in its command line. Returns its name in messages."""
    pid = child(ppo, words)
    os.kill(pid, signal.SIGSTOP)
    return f"{PROCESSES[words]} (pid {pid}) is stopped"


def check_end(done: FinishedRun, stopped: str) -> None:
    """Check that the run ended because this process was stopped."""
    assert done.code == 1, done.output[-3000:]
    error = done.output.splitlines()[-1]
    assert error.startswith("error: no progress for ") and stopped in error, done.output[-3000:]
    assert "the same command starts from scratch" in error and "Traceback" not in done.output, done.output[-3000:]
    (stacks,) = (done.folder / "stalls").iterdir()
    assert str(stacks) in error
    text = stacks.read_text()
    pid = stopped.split("pid ")[1].split(")")[0]
    assert f"--- process {pid}\n" in text and stopped in text
    assert "stall_monitor.py" in text  # the controller's own stack


def test_stopped_process_is_named(ppo: Runner, leaves_nothing: Callable[[], None]) -> None:
    limits = ("trainer.stall_timeout=20",)
    program = start_run(ppo, "actor_rollout_ref.rollout.name=vllm", *limits)
    for count, words in enumerate(("EngineCore", "RolloutActor"), 1):
        stopped = stop(ppo, words)
        wait_until(program, lambda: stopped in program.printed, f"{stopped}: not reported")  # noqa: B023
        no_progress = "note no progress for "
        wait_until(program, lambda: program.printed.count(no_progress) >= count, "no stall is reported")  # noqa: B023
        os.kill(int(stopped.split("pid ")[1].split(")")[0]), signal.SIGCONT)
        steps = steps_of(ppo)
        wait_until(program, lambda: steps_of(ppo) >= steps + 2, "the run does not resume")  # noqa: B023
        again = "progress again, after "
        wait_until(program, lambda: program.printed.count(again) >= count, "progress is not reported")  # noqa: B023
    stopped = stop(ppo, "PolicyActor")
    check_end(ppo.finish(program), stopped)
    assert "note no progress for " in program.printed
    leaves_nothing()


def test_local_run_ends_when_the_engine_core_stops(ppo: Runner, leaves_nothing: Callable[[], None]) -> None:
    limits = ("trainer.stall_timeout=5",)
    program = start_run(ppo, "trainer.controller=local", "actor_rollout_ref.rollout.name=vllm", *limits)
    stopped = stop(ppo, "EngineCore")
    check_end(ppo.finish(program), stopped)
    leaves_nothing()
