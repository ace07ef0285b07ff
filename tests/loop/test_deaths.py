"""A run that ends for any reason leaves no process and no shared-memory file. A dead worker is named, and the run
continues."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache, partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import psutil
import pytest

from alphaapollo.processes.allocator import ONE_ARENA
from alphaapollo.runs.command_history import read_history
from scripts.chaos import faults
from scripts.chaos.scenes import differences
from tests.loop.conftest import FinishedRun, Runner, Task, child, processes_of
from tests.loop.engine_kit import ENGINES_AT_NIGHT, PLUGIN_ENGINES
from tests.loop.warm import Program
from tests.nightly import at_night

POLICY_DIED, ROLLOUT_DIED = "the policy worker of rank 0", "the rollout worker of rank 0"
CORE_DIED = "rollout engine 0: its core process died"
SIX = ("trainer.total_training_steps=6", "trainer.save_freq=2", "trainer.val_before_train=False")
ENDLESS = ("trainer.total_training_steps=100000", "trainer.val_before_train=False", "trainer.save_freq=-1")
FAKE, VLLM = (f"actor_rollout_ref.rollout.name={name}" for name in ("fake", "vllm"))
LOCAL, RAY = "trainer.controller=local", "trainer.controller=ray"


def start_run(ppo: Runner, *overrides: str) -> Program:
    """Start a run and wait for its first iterations."""
    program = ppo.start(*ENDLESS, *overrides)
    ppo.wait_for(lambda: ppo.last_step() >= 3)
    return program


def wait_for_checkpoint(ppo: Runner, step: int) -> Path:
    """Wait until the run has completed the next step, too, and has written the checkpoint in the background. Returns
    the folder of checkpoints."""
    folder = ppo.out / "test/run/checkpoints"
    ppo.wait_for(lambda: ppo.last_step() > step and (folder / f"step_{step:06d}").exists())
    return folder


def list_listening_sockets(processes: Mapping[int, str]) -> list[tuple[str, Any]]:
    """Return (command, address) of the sockets that accept connections or datagrams."""
    listening = []
    for pid, line in processes.items():
        with suppress(psutil.NoSuchProcess):
            sockets = psutil.Process(pid).net_connections("inet")
            listening += [(line, socket.laddr) for socket in sockets if not socket.raddr]
    return listening


def check_processes_of_ray(ppo: Runner) -> None:
    """They are not reachable from other machines, and workers have the driver's priority and one memory arena."""
    processes = processes_of(ppo)
    workers = [psutil.Process(pid) for pid, line in processes.items() if "ray::" in line]
    assert {worker.nice() for worker in workers} == {os.getpriority(os.PRIO_PROCESS, 0)}
    assert all(ONE_ARENA.items() <= worker.environ().items() for worker in workers)
    lines = " ".join(processes.values())
    assert "DashboardAgent" in lines and "raylet" in lines  # Ray renames some processes
    listening = list_listening_sockets(processes)
    assert all(any(name in line for line, _ in listening) for name in ("PolicyActor", "raylet", "gcs_server"))
    assert not [(line, at) for line, at in listening if not ip_address(at.ip.removeprefix("::ffff:")).is_loopback]


@pytest.mark.parametrize(
    ("number", "to_all"), [(signal.SIGTERM, True), pytest.param(signal.SIGINT, False, marks=pytest.mark.nightly)]
)
def test_signals(number: int, to_all: bool, ppo: Runner, leaves_nothing: Callable[[], None]) -> None:
    """To the driver and then to its process group, as by `timeout`, or also to every process of the run, as by Slurm.
    Only the former can save. test_saves_behind.py shows it without Ray, test_async.py a kill of a driver on Ray."""
    program = start_run(ppo, RAY, FAKE, "trainer.save_on_signal=true")
    check_processes_of_ray(ppo)
    others = [pid for pid in processes_of(ppo) if to_all and pid != program.pid]
    if number != signal.SIGINT:  # a second Ctrl-C ends the saving
        program.signal(number)
    os.killpg(program.pid, number)
    for pid in others:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT)
            os.kill(pid, signal.SIGTERM)
    done = ppo.finish(program)
    last = done.output.splitlines()[-1]
    assert done.code == 130 and last.startswith("interrupted; "), done.output[-3000:]
    assert "Traceback" not in done.output and "GCS" not in done.output, done.output[-3000:]
    assert read_history(done.folder)[-1].state == "interrupted"
    checkpoint = done.folder / "checkpoints" / f"step_{done.metrics[-1]['step']:06d}"
    assert to_all or (checkpoint.is_dir() and last.endswith(f"resumes from {checkpoint}")), last
    leaves_nothing()


@pytest.mark.parametrize("engine", ENGINES_AT_NIGHT)
def test_a_run_without_ray_is_not_reachable_from_other_machines(
    engine: str, ppo: Runner, leaves_nothing: Callable[[], None]
) -> None:
    program = start_run(ppo, LOCAL, f"actor_rollout_ref.rollout.name={engine}")
    processes = processes_of(ppo)
    listening = list_listening_sockets(processes)
    assert engine == "vllm" or any(f"{engine}::scheduler" in line for line, _ in listening), processes
    assert not [(line, at) for line, at in listening if not ip_address(at.ip.removeprefix("::ffff:")).is_loopback]
    if engine in PLUGIN_ENGINES:  # its processes exchange pickles over sockets in the file system
        scheduler = next(psutil.Process(pid) for pid, line in processes.items() if f"{engine}::scheduler" in line)
        sockets = [one.laddr for each in (scheduler, scheduler.parent()) for one in each.net_connections("unix")]
        paths = [Path(path) for path in sockets if path and Path(path).is_socket()]
        assert paths and not [path for path in paths if path.stat().st_mode & 0o077], (paths, sockets)
    program.signal(signal.SIGKILL)
    program.wait()
    leaves_nothing()


@pytest.mark.core
def test_death_without_restarts_is_an_error(ppo: Runner, leaves_nothing: Callable[[], None]) -> None:
    module = ppo.out / "no_replacements.py"
    module.write_text("from alphaapollo.session import publish\npublish.MAX_REPLACEMENTS = 0\n")
    program = start_run(ppo, LOCAL, VLLM, "trainer.max_restarts=0", f"algorithm.custom_module={module}")
    os.kill(child(ppo, "EngineCore"), signal.SIGKILL)
    done = ppo.finish(program)
    last = done.output.splitlines()[-1]
    assert done.code == 1 and last.startswith(f"error: {CORE_DIED}"), done.output[-3000:]
    assert "already replaced 0 times" in last, last
    assert last.endswith("no checkpoint was written, so the same command starts from scratch"), last
    assert "Traceback" not in done.output, done.output[-3000:]
    leaves_nothing()


@pytest.fixture(scope="module")
def undisturbed(task: Task, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], FinishedRun]]:
    """Function that returns a run of SIX with an engine, to its end without a death."""
    runner = Runner(task, tmp_path_factory.mktemp("undisturbed"))
    yield cache(lambda engine: runner.run(*SIX, LOCAL, f"actor_rollout_ref.rollout.name={engine}", name=engine))
    runner.close()


DEATHS = {"learn": ("PolicyActor", POLICY_DIED, 4), "collect_groups": ("RolloutActor", ROLLOUT_DIED, 6)}
"""Part of the step before which a process dies -> words of its command line, its name in messages, and the step."""


def test_run_continues_unchanged_after_deaths(
    ppo: Runner, undisturbed: Callable[[str], FinishedRun], leaves_nothing: Callable[[], None]
) -> None:
    """The run restarts from its newest checkpoint."""
    *_, held = [ppo.hold(part, step, f"release_{step}") for part, (*_, step) in DEATHS.items()]
    program = ppo.start(*SIX, RAY, FAKE, held)
    whole = undisturbed("fake")
    for process, _, step in DEATHS.values():
        wait_for_checkpoint(ppo, step - 2)
        os.kill(child(ppo, process), signal.SIGKILL)
        (ppo.out / f"release_{step}").touch()
    done = ppo.finish(program)
    assert done.code == 0 and "Traceback" not in done.output, done.output[-4000:]
    for number, (_, name, step) in enumerate(DEATHS.values(), 1):
        assert name in done.output and f"restart {number} of at most 3" in done.output, done.output[-4000:]
        assert "resumes from" in done.output and f"step_{step - 2:06d}" in done.output, done.output[-4000:]
    assert differences(whole.folder, done.folder) == []
    leaves_nothing()


KILL = """
import os, signal
from pathlib import Path

def kill_engine():
    file = Path({file!r})
    if file.exists():
        pid = int(file.read_text())
        file.unlink()
        os.kill(pid, signal.SIGKILL)
"""


def kill_engine_while_grading(ppo: Runner) -> Path:
    """Make the reward function of a run kill the process whose pid is in a file, before it grades. Returns the file."""
    file = ppo.out / "kill"
    ppo.reward.write_text(
        KILL.format(file=str(file)) + ppo.reward.read_text().replace("):", "):\n    kill_engine()", 1)
    )
    return file


def is_at(ppo: Runner, step: int) -> bool:
    return ppo.last_step() == step


@pytest.mark.parametrize(
    "engine",
    [pytest.param("vllm", marks=pytest.mark.core), *at_night(PLUGIN_ENGINES, PLUGIN_ENGINES)],
)
def test_an_engine_that_dies_is_replaced(
    ppo: Runner, undisturbed: Callable[[str], FinishedRun], engine: str, leaves_nothing: Callable[[], None]
) -> None:
    """The run continues without a restart, and ends like an undisturbed one. The engine dies before an update, before
    rollouts, and when the first of several answers is graded."""
    file = kill_engine_while_grading(ppo)
    *_, held = [
        ppo.hold(*at) for at in (("learn", 2, "one"), ("collect_groups", 4, "two"), ("collect_groups", 6, "three"))
    ]
    program = ppo.start(*SIX, LOCAL, f"actor_rollout_ref.rollout.name={engine}", held)
    whole = undisturbed(engine)
    for step, release in ((1, "one"), (3, "two"), (5, "three")):
        ppo.wait_for(partial(is_at, ppo, step))
        pid = child(ppo, "EngineCore" if engine == "vllm" else f"{engine}::scheduler")
        file.write_text(str(pid)) if release == "three" else os.kill(pid, signal.SIGKILL)
        (ppo.out / release).touch()
    done = ppo.finish(program)
    assert done.code == 0 and "Traceback" not in done.output and "restart 1" not in done.output, done.output[-4000:]
    assert " ".join(done.output.split()).count(CORE_DIED) == 3, done.output[-4000:]
    assert [line["engines/replaced"] for line in done.metrics] == [0, 0, 1, 0, 1, 0, 1]
    found = differences(whole.folder, done.folder)
    # The last bits of SGLang's log-probs depend on the batch. Its tokens, and so the model, do not.
    assert found == [] if engine == "vllm" else "the model" not in found
    leaves_nothing()


def test_killed_run_with_a_damaged_checkpoint_resumes_unchanged(
    ppo: Runner, undisturbed: Callable[[str], FinishedRun], tmp_path: Path
) -> None:
    """The same command resumes from the checkpoint before the damaged one. Other results would be found."""
    words = (*SIX, LOCAL, FAKE, "trainer.max_ckpt_to_keep=null", ppo.hold("learn", step=6))
    program = ppo.start(*words)
    checkpoints = wait_for_checkpoint(ppo, 4)
    program.signal(signal.SIGKILL)
    program.wait()
    (ppo.out / "release").touch()
    _, file = faults.damage(checkpoints, random.Random(11))
    done, whole = ppo.run(*words), undisturbed("fake").folder
    assert file in done.output and "step_000002" in done.output, done.output[-3000:]
    assert differences(whole, done.folder) == []
    other = shutil.copytree(whole, tmp_path / "other")
    expected = ["metrics of step 1: critic/score/mean", "rollouts", "the model"]
    for number, (name, old, new) in enumerate(
        [
            ("model/model.safetensors", b"", b"x"),
            ("rollouts/step_000003.jsonl", b'"reward": ', b'"reward": 1'),
            ("metrics.jsonl", b'"critic/score/mean": ', b'"critic/score/mean": 1'),
        ],
        1,
    ):
        content = (other / name).read_bytes()
        assert old in content
        (other / name).write_bytes(content.replace(old, new, 1))
        assert differences(whole, other) == expected[-number:]


def test_full_disk_while_saving_keeps_the_last_complete_checkpoint(ppo: Runner, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=7m", "none", str(small)], check=False)
    if mounted.returncode:
        pytest.skip("needs root to mount a small disk")
    try:
        sizes = ("trainer.save_freq=1", "trainer.max_ckpt_to_keep=null", "trainer.total_training_steps=20")
        words = (LOCAL, FAKE, *sizes, f"trainer.output_dir={small}", "trainer.val_before_train=False")
        done = ppo.finish(ppo.start(*words))
        assert done.code == 1
        assert "error:" in done.output and "MiB free" in done.output, done.output[-3000:]
        assert str(small) in done.output
        assert sorted((small / "test/run/checkpoints").glob("step_*/progress.json"))
    finally:
        subprocess.run(["umount", str(small)], check=True)
