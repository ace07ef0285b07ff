"""A stopped process is named. If it continues, the run continues; otherwise the run ends with stack dumps."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from tests.loop.conftest import FinishedRun, Runner, child

PROCESSES = {  # words of the command line -> name in messages
    "EngineCore": "the engine core of rollout worker 0",
    "RolloutActor": "the rollout worker of rank 0",
    "PolicyActor": "the policy worker of rank 0",
}
ENDLESS = ("trainer.total_training_steps=100000", "trainer.val_before_train=False", "trainer.save_freq=-1")


def stop(ppo: Runner, words: str) -> tuple[int, str]:
    """Stop the only process with these words in its command line. Returns its pid, and what messages say about it."""
    pid = child(ppo, words)
    os.kill(pid, signal.SIGSTOP)
    return pid, f"{PROCESSES[words]} (pid {pid}) is stopped"


def check_end(done: FinishedRun, pid: int, stopped: str) -> None:
    """Check that the run ended because this process was stopped."""
    assert done.code == 1, done.output[-3000:]
    error = done.output.splitlines()[-1]
    assert error.startswith("error: no progress for ") and stopped in error, done.output[-3000:]
    assert "the same command starts from scratch" in error and "Traceback" not in done.output, done.output[-3000:]
    (stacks,) = (done.folder / "stalls").iterdir()
    assert str(stacks) in error
    text = stacks.read_text()
    assert f"--- process {pid}\n" in text and stopped in text
    assert "stall_monitor.py" in text  # the controller's own stack


@pytest.mark.parametrize(
    ("controller", "engine", "continues", "ends"),
    [
        pytest.param("ray", "fake", "RolloutActor", "PolicyActor", marks=pytest.mark.nightly),
        ("local", "vllm", "EngineCore", "EngineCore"),
    ],
)
def test_stopped_process_is_named(
    ppo: Runner, controller: str, engine: str, continues: str, ends: str, leaves_nothing: Callable[[], None]
) -> None:
    module = ppo.out / "short_waits.py"  # a stopped actor of Ray reports no stacks
    module.write_text("from alphaapollo.controller import stall_monitor as monitor\nmonitor.STACKS_SECONDS = 5.0\n")
    words = [f"trainer.controller={controller}", f"actor_rollout_ref.rollout.name={engine}", "trainer.max_restarts=0"]
    words += [f"algorithm.custom_module={module}"]
    program = ppo.start(*ENDLESS, *words, "trainer.stall_timeout=20")
    ppo.wait_for(lambda: ppo.last_step() >= 2)
    pid, stopped = stop(ppo, continues)
    ppo.wait_for(lambda: stopped in program.printed and "note no progress for " in program.printed)
    os.kill(pid, signal.SIGCONT)
    step = ppo.last_step()
    ppo.wait_for(lambda: ppo.last_step() >= step + 2 and "progress again, after " in program.printed)
    pid, stopped = stop(ppo, ends)
    check_end(ppo.finish(program), pid, stopped)
    assert program.printed.count("note no progress for ") >= 2
    leaves_nothing()
