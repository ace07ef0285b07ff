"""Engines of loops of one's own that die or hang."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from alphaapollo import Trainer, make_row
from alphaapollo.controller.errors import RunStalled, WorkerDied
from alphaapollo.runs.command_history import read_history
from tests.loop.conftest import Task
from tests.loop.test_own_loop import keep_warm_process, words  # noqa: F401  (a fixture)
from tests.loop.warm import KEPT


def signal_engine(number: int) -> None:
    """Send a signal to the core of the only engine that this process has started."""
    cores = {one.pid for one in psutil.Process().children(recursive=True) if "EngineCore" in one.name()}
    (pid,) = cores - KEPT
    os.kill(pid, number)


def test_a_stall_is_named(task: Task, tmp_path: Path) -> None:
    """The verb raises the reason, and the end of the block raises it again if the caller goes on."""
    settings = {"model.path": task.model, "trainer.stall_timeout": 5}
    reason = r"the engine core of rollout worker 0 \(pid \d+\) is stopped"
    with (
        pytest.raises(RunStalled, match=reason),
        Trainer(settings, *words(tmp_path), "rollout.name=vllm", "rollout.kv_cache_gib=0.1") as t,
    ):
        signal_engine(signal.SIGSTOP)
        with pytest.raises(RunStalled, match=reason):
            t.sample(["7"])
    assert read_history(t.folder)[-1].state == "failed"


def test_an_engine_that_dies_is_replaced(task: Task, tmp_path: Path) -> None:
    """If the policy has changed since the last publish, the verb raises the reason instead."""
    settings = {"model.path": task.model}
    with Trainer(settings, *words(tmp_path), "rollout.name=vllm", "rollout.kv_cache_gib=0.1") as t:
        tokens = [one.turns[0].completion for one in t.sample(["7"], n=4, seed=1)[0].trajectories]
        signal_engine(signal.SIGKILL)
        again = [one.turns[0].completion for one in t.sample(["7"], n=4, seed=1)[0].trajectories]
        assert [(one.token_ids, one.logprobs) for one in again] == [(one.token_ids, one.logprobs) for one in tokens]
        t.forward_backward([make_row([1, 2, 3])])
        t.optim_step(lr=1e-2)
        signal_engine(signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(WorkerDied, match="the policy has changed"):
                t.sample(["7"])
        t.publish()
        t.sample(["7"])
