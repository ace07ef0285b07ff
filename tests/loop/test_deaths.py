"""A run that ends for any reason leaves no process and no shared-memory file. A dead worker is named, and the run
continues."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import psutil
import pytest

from alphaapollo.processes.allocator import ONE_ARENA
from alphaapollo.runs.run_history import read_history
from tests.loop.conftest import DEADLINE, Runner, child, processes_of
from tests.loop.engine_kit import needs_sglang
from tests.loop.warm import Program

ENDLESS = ("trainer.total_training_steps=100000", "trainer.val_before_train=False", "trainer.save_freq=-1")


def start_run(ppo: Runner, *overrides: str) -> Program:
    """Start a run and wait for its first iterations."""
    program = ppo.start(*ENDLESS, *overrides)
    metrics = ppo.out / "test/run/metrics.jsonl"
    end = time.monotonic() + DEADLINE
    while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 3):
        assert program.wait(0.05) is None, program.printed[-4000:]
        assert time.monotonic() < end, "the run makes no progress"
    return program


def listeners(pid: int) -> list[Any]:
    """Sockets on which a process accepts connections or datagrams."""
    try:
        return [one for one in psutil.Process(pid).net_connections("inet") if not one.raddr]
    except psutil.NoSuchProcess:
        return []


def test_interrupt(ppo: Runner, leaves_nothing: Callable[[], None]) -> None:
    program = start_run(ppo, "trainer.save_on_signal=true")
    program.signal(signal.SIGTERM)
    done = ppo.finish(program)
    assert done.code == 130
    (checkpoint,) = (done.folder / "checkpoints").iterdir()
    assert checkpoint.name == f"step_{done.metrics[-1]['step']:06d}"
    last = done.output.splitlines()[-1]
    assert last.startswith("interrupted; ") and last.endswith(f"resumes from {checkpoint}"), done.output[-3000:]
    assert "Traceback" not in done.output, done.output[-3000:]
    leaves_nothing()


@pytest.mark.parametrize(
    ("number", "to_all"),
    [(signal.SIGTERM, False), (signal.SIGTERM, True), (signal.SIGINT, True)],
)
def test_signals_of_job_systems(number: int, to_all: bool, ppo: Runner, leaves_nothing: Callable[[], None]) -> None:
    """A signal to the driver's process group (`timeout`), or to every process of the run (Slurm)."""
    program = start_run(ppo, "trainer.save_on_signal=true")
    ray = [pid for pid in processes_of(ppo) if to_all and pid != program.pid]
    if number != signal.SIGINT:  # `timeout` signals its child, and then the group of both
        program.signal(number)
    os.killpg(program.pid, number)
    for pid in ray:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    done = ppo.finish(program)
    assert done.code == 130, done.output[-3000:]
    assert done.output.splitlines()[-1].startswith("interrupted; "), done.output[-3000:]
    assert "Traceback" not in done.output and "GCS" not in done.output, done.output[-3000:]
    assert read_history(done.folder)[-1].state == "interrupted"
    assert to_all or (done.folder / "checkpoints" / f"step_{done.metrics[-1]['step']:06d}").is_dir()
    leaves_nothing()


def test_kill_of_the_driver(ppo: Runner, leaves_nothing: Callable[[], None]) -> None:
    """During the run, its processes are not reachable from other machines, and its workers have the driver's priority
    and one memory arena."""
    program = start_run(ppo)
    processes = processes_of(ppo)
    workers = [psutil.Process(pid) for pid, line in processes.items() if "ray::" in line]
    assert {worker.nice() for worker in workers} == {os.getpriority(os.PRIO_PROCESS, 0)}
    assert all(ONE_ARENA.items() <= worker.environ().items() for worker in workers)
    lines = " ".join(processes.values())
    assert "DashboardAgent" in lines and "raylet" in lines  # Ray renames some processes
    listening = [(processes[pid], one.laddr) for pid in processes for one in listeners(pid)]
    assert all(any(name in line for line, _ in listening) for name in ("PolicyActor", "raylet", "gcs_server"))
    assert not [(line, at) for line, at in listening if not ip_address(at.ip.removeprefix("::ffff:")).is_loopback]
    program.signal(signal.SIGKILL)
    program.wait()
    leaves_nothing()


@pytest.mark.core
def test_kill_of_a_worker_is_named(ppo: Runner, leaves_nothing: Callable[[], None]) -> None:
    program = start_run(ppo, "actor_rollout_ref.rollout.name=vllm", "trainer.max_restarts=0")
    os.kill(child(ppo, "RolloutActor"), signal.SIGKILL)
    done = ppo.finish(program)
    assert done.code == 1
    last = done.output.splitlines()[-1]
    assert last.startswith("error: the rollout worker of rank 0 (pid "), done.output[-3000:]
    assert last.endswith("no checkpoint was written, so the same command starts from scratch"), last
    assert "Traceback" not in done.output, done.output[-3000:]
    leaves_nothing()


SIX = ("trainer.total_training_steps=6", "trainer.save_freq=2", "trainer.val_before_train=False")


@pytest.mark.parametrize(
    ("words", "engine", "controller", "before", "named"),
    [
        ("PolicyActor", "fake", "ray", "learn", "the policy worker of rank 0"),
        pytest.param(
            *("EngineCore", "vllm", "local", "learn", "rollout engine 0: its core process died"),
            marks=pytest.mark.core,
        ),
        ("RolloutActor", "fake", "ray", "collect_groups", "the rollout worker of rank 0"),
        ("EngineCore", "vllm", "local", "collect_groups", "rollout engine 0: its core process died"),
        pytest.param(
            *("sglang::scheduler", "sglang", "local", "learn", "rollout engine 0: its core process died"),
            marks=needs_sglang,
        ),
    ],
)
def test_run_continues_unchanged_after_a_kill(
    ppo: Runner,
    words: str,
    engine: str,
    controller: str,
    before: str,
    named: str,
    leaves_nothing: Callable[[], None],
) -> None:
    """The run restarts from the checkpoint."""
    settings = (*SIX, f"actor_rollout_ref.rollout.name={engine}")
    program = ppo.start(*settings, f"trainer.controller={controller}", ppo.hold(before, step=4))
    whole = ppo.run(*settings, "trainer.controller=local", name="whole")
    metrics_file, end = ppo.out / "test/run/metrics.jsonl", time.monotonic() + DEADLINE
    checkpoint = ppo.out / "test/run/checkpoints/step_000002"  # written in the background
    while not (metrics_file.exists() and '"step": 3' in metrics_file.read_text() and checkpoint.exists()):
        assert program.wait(0.05) is None, program.printed[-4000:]
        assert time.monotonic() < end, program.printed[-4000:]
    os.kill(child(ppo, words), signal.SIGKILL)
    (ppo.out / "release").touch()
    done = ppo.finish(program)
    assert done.code == 0, done.output[-4000:]
    assert named in done.output and "Traceback" not in done.output, done.output[-4000:]
    assert "restart 1 of at most 3" in done.output, done.output[-4000:]
    assert "resumes from" in done.output and "step_000002" in done.output, done.output[-4000:]
    # The last bits of SGLang's log-probs, and its hits in the prefix cache, depend on the batch. Its tokens do not.
    is_exact = engine != "sglang"
    for one, other in zip(whole.metrics, done.metrics, strict=True):
        found, expected = without_timing(one), without_timing(other)
        for metrics in () if is_exact else (found, expected):
            metrics.pop("rollout/prompt_tokens_cached", None)
        assert found == (expected if is_exact else pytest.approx(expected, rel=1e-3, abs=1e-5, nan_ok=True))
    for step in range(1, 7):
        rows, same = (
            [line["rows"] if is_exact else [turn["text"] for turn in line["turns"]] for line in run.rollouts(step)]
            for run in (whole, done)
        )
        assert rows == same
    first, second = ((run.folder / "model/model.safetensors").read_bytes() for run in (whole, done))
    assert first == second
    leaves_nothing()


def without_timing(metrics: dict[str, float]) -> dict[str, float]:
    """Metrics that are equal in two runs of the same command: no times, no memory, no checks at start."""
    own = ("timing", "memory/", "perf/", "checkpoint/", "rollout/tokens_per_second", "actor/sharing_gap")
    return {name: value for name, value in metrics.items() if not name.startswith(own)}


def test_full_disk_while_saving_keeps_the_last_complete_checkpoint(ppo: Runner, tmp_path: Path) -> None:
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
        assert "error:" in done.output and "MiB free" in done.output, done.output[-3000:]
        assert str(small) in done.output
        whole = sorted((small / "test/run/checkpoints").glob("step_*/progress.json"))
        assert whole
    finally:
        subprocess.run(["umount", str(small)], check=True)
