"""A Ray that this process has started: its nodes, its death, and a start that fails."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from alphaapollo.config.schema import Rollout, TuningTrainer
from alphaapollo.controller import ray_cluster, ray_launcher
from alphaapollo.controller.errors import CANCELLED_BY_MONITOR, WorkerDied
from alphaapollo.controller.placement import Placement
from alphaapollo.controller.ray_cluster import (
    RayProcess,
    compute_code_version,
    describe_node_differences,
    inspect_node,
)
from alphaapollo.controller.ray_launcher import RayWorkerGroups
from alphaapollo.controller.stall_monitor import StallMonitor, StartLimits
from alphaapollo.controller.worker_groups import WorkerSpecs
from alphaapollo.processes.watchdog import RUN
from alphaapollo.utils.heartbeat import read_process
from tests.processes import start_process, wait_until
from tests.unit.event_loop import in_event_loop

Process = subprocess.Popen[bytes]


class Silent:
    """A call would wait for ever."""

    async def close(self, cleanup: Any = ()) -> None:
        raise AssertionError("called")


def monitor(required_pids: Mapping[str, int], notify: Callable[[str], None]) -> StallMonitor:
    return StallMonitor([], StartLimits(600, 60), "cpu", notify, lambda: "resume", required_pids)


def set_ray_processes(monkeypatch: pytest.MonkeyPatch, processes: dict[str, list[Any]]) -> None:
    monkeypatch.setattr(ray_cluster.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray_cluster.ray._private.worker, "_global_node", SimpleNamespace(all_processes=processes))


@pytest.fixture
def own_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Process, Process]]:
    """Its GCS and its raylet."""
    with start_process() as gcs, start_process() as raylet:
        processes = {"gcs_server": [SimpleNamespace(process=gcs)], "raylet": [SimpleNamespace(process=raylet)]}
        set_ray_processes(monkeypatch, processes | {"log_monitor": []})
        yield gcs, raylet


def test_signals_of_job_systems_do_not_end_processes_of_ray() -> None:
    process = RayProcess(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert os.getsid(process.pid) == process.pid != os.getsid(0)
    for number in (signal.SIGTERM, signal.SIGHUP):
        process.send_signal(number)
    assert process.communicate(b"alive") == (b"alive", None)
    with RayProcess(["sleep", "1000"]) as sleeping:
        sleeping.terminate()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()).isdisjoint((signal.SIGTERM, signal.SIGHUP))


def test_a_death_during_the_start_names_the_process(own_ray: tuple[Process, Process]) -> None:
    gcs, _ = own_ray

    async def begin() -> None:
        async with monitor(ray_cluster.find_local_ray_processes(), print):
            gcs.kill()
            await asyncio.sleep(60)

    with pytest.raises(ray_cluster.WorkerDied, match=rf"Ray's GCS .*\(pid {gcs.pid}\)"):
        asyncio.run(begin())


def test_the_workers_of_a_dead_ray_are_killed(
    own_ray: tuple[Process, Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    gcs, raylet = own_ray
    calls: list[str] = []
    monkeypatch.setattr(ray_cluster.ray, "shutdown", lambda: calls.append("ray.shutdown"))
    monkeypatch.setattr(ray_launcher, "kill_run_processes", lambda run: calls.append(f"end {run}"))
    monkeypatch.setenv(RUN, "7-abc")
    assert ray_cluster.find_local_ray_processes() == {"Ray's raylet": raylet.pid, "Ray's GCS": gcs.pid}
    assert not ray_cluster.is_local_ray_unresponsive()
    raylet.send_signal(signal.SIGSTOP)
    assert wait_until(lambda: (seen := read_process(raylet.pid)) is not None and seen.is_stopped)
    assert ray_cluster.is_local_ray_unresponsive()
    raylet.send_signal(signal.SIGCONT)
    gcs.kill()
    gcs.wait()
    assert ray_cluster.is_local_ray_unresponsive()
    groups: Any = object.__new__(RayWorkerGroups)
    groups.specs, groups.ranks_by_role = WorkerSpecs(placement=Placement(device="cpu")), {"rollout": Silent()}
    asyncio.run(groups.close())
    assert calls == ["end 7-abc", "ray.shutdown"]


def test_a_failed_start_is_a_worker_death(monkeypatch: pytest.MonkeyPatch) -> None:
    constants, node = ray_cluster.ray._private.ray_constants, ray_cluster.ray._private.node.Node
    start_monitor, attempts = node.start_monitor, []

    def slow(**how: Any) -> None:
        attempts.append(how)
        assert not constants.ENABLE_RAY_CLUSTER and how["address"] == "local"
        assert node.start_monitor is not start_monitor
        raise Exception("The current node timed out during startup.\n  Look into its logs.")

    monkeypatch.setattr(ray_cluster.ray, "init", slow)
    monkeypatch.setattr(ray_cluster, "restrict_network_to_loopback", lambda: None)
    with pytest.raises(ray_cluster.WorkerDied, match="The current node timed") as caught:
        ray_cluster.start_local_cluster()
    assert len(attempts) == 1
    assert caught.value.role == "Ray's start" and constants.ENABLE_RAY_CLUSTER and node.start_monitor is start_monitor


@pytest.fixture
def other() -> Iterator[Process]:
    with start_process() as process:
        yield process


@in_event_loop
async def test_a_death_ends_the_block(other: Process) -> None:
    lines: list[str] = []
    with pytest.raises(WorkerDied, match=rf"Ray's raylet .*\(pid {other.pid}\)") as caught:
        async with monitor({"Ray's raylet": other.pid}, lines.append):
            await asyncio.sleep(0)  # it is alive at the first look
            other.kill()
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError as error:
                lines += error.args
                raise
    died = str(caught.value)
    assert caught.value.role == "Ray" and lines == [f"{died}; resume", CANCELLED_BY_MONITOR]


@in_event_loop
async def test_first_failure_of_a_worker_is_not_named(other: Process) -> None:
    with pytest.raises(WorkerDied, match=r"^Ray's GCS"):
        async with monitor({"Ray's GCS": other.pid}, print):
            other.kill()
            other.wait()
            raise WorkerDied("the policy worker died: its owner's node has crashed", "policy")


@in_event_loop
async def test_a_death_after_the_block_is_ignored(other: Process) -> None:
    with pytest.raises(ValueError, match="a key"):
        async with monitor({"Ray's raylet": other.pid}, print):
            raise ValueError("a key")
    other.kill()
    other.wait()
    await asyncio.sleep(0.05)


def is_enough(monkeypatch: pytest.MonkeyPatch, gpus: list[int], nodes: int, device: str, engine_nodes: int = 0) -> bool:
    """Whether a run with this many nodes starts on nodes with these numbers of GPUs."""
    trainer = TuningTrainer.model_validate({"nnodes": nodes, "device": device, "start_timeout": 1e-6})
    names = {"Alive": True, "NodeManagerAddress": "10.0.0.1", "NodeManagerHostname": "a"}
    found = [names | {"Resources": {"GPU": float(count)} if count else {}} for count in gpus]
    monkeypatch.setattr(ray_cluster.ray, "nodes", lambda: [*found, {"Alive": False}])
    try:
        ray_cluster.wait_for_nodes(trainer, Rollout(nnodes=engine_nodes))
    except ValueError as error:
        assert "have joined" in str(error) and "trainer.nnodes" in str(error)
        return False
    return True


def test_a_run_waits_for_its_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    check = partial(is_enough, monkeypatch)
    assert check([8, 8], 2, "cuda") and not check([8], 2, "cuda") and not check([8, 0], 2, "cuda")
    assert check([8, 4], 1, "auto", 1) and not check([8], 1, "auto", 1)
    assert check([0, 0], 2, "cpu") and check([0, 0], 2, "auto") and not check([0, 0], 3, "cpu")
    assert not check([0, 0, 4], 2, "auto"), "a GPU is there: nodes without are not enough"
    assert not check([0, 0], 1, "cuda"), "their GPUs may still come"


def test_nodes_that_have_the_same_do_not_differ(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "README.md").write_text("here")
    paths = {"model.path": "model"}
    here = inspect_node(paths, str(tmp_path))
    assert here["model.path=model"] == "1 files of 2 bytes"
    assert here["torch"][:1].isdigit() and "+" not in str(here)
    assert describe_node_differences(here, here) == ""


def test_each_difference_is_named() -> None:
    here = {"Python": "3.12.1", "torch": "2.13.0", "model.path=/m": "3 files of 5,000 bytes", "reward=/r.py": "x"}
    there = here | {"torch": "2.12.0", "model.path=/m": "missing"}
    text = describe_node_differences(there, here)
    assert text == "torch is 2.12.0, not 2.13.0, model.path=/m is missing, not 3 files of 5,000 bytes"


def test_our_own_files_count_as_a_version() -> None:
    assert compute_code_version().startswith("0.") and "(files " in compute_code_version()
