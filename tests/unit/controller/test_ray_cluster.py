"""A Ray that this process has started: its death, and a start that fails."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from alphaapollo.controller import ray_cluster, ray_launcher
from alphaapollo.controller.placement import Placement
from alphaapollo.controller.ray_cluster import RayProcess
from alphaapollo.controller.ray_launcher import RayWorkerGroups
from alphaapollo.controller.stall_monitor import monitor_processes
from alphaapollo.controller.worker_groups import WorkerSpecs
from alphaapollo.processes.watchdog import RUN
from alphaapollo.utils.heartbeat import read_process

Process = subprocess.Popen[bytes]


class Silent:
    """A call would wait for ever."""

    async def close(self, cleanup: Any = ()) -> None:
        raise AssertionError("called")


@pytest.fixture
def own_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Process, Process]]:
    """Its GCS and its raylet."""
    gcs, raylet = (subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2))
    info = {
        "gcs_server": [SimpleNamespace(process=gcs)],
        "raylet": [SimpleNamespace(process=raylet)],
        "log_monitor": [],
    }
    monkeypatch.setattr(ray_cluster.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray_cluster.ray._private.worker, "_global_node", SimpleNamespace(all_processes=info))
    yield gcs, raylet
    for process in (gcs, raylet):
        process.kill()
        process.wait()


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
        async with monitor_processes(ray_cluster.find_local_ray_processes(), print):
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
    while not (seen := read_process(raylet.pid)) or not seen.is_stopped:
        time.sleep(0.01)
    assert ray_cluster.is_local_ray_unresponsive()
    raylet.send_signal(signal.SIGCONT)
    gcs.kill()
    gcs.wait()
    assert ray_cluster.is_local_ray_unresponsive()
    groups: Any = object.__new__(RayWorkerGroups)
    groups.specs, groups.ranks_by_role = WorkerSpecs(placement=Placement(device="cpu")), {"rollout": Silent()}
    asyncio.run(groups.close())
    assert calls == ["end 7-abc", "ray.shutdown"]


def test_a_joined_cluster_has_no_own_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray_cluster.ray._private.worker, "_global_node", SimpleNamespace(all_processes={}))
    assert ray_cluster.find_local_ray_processes() == {} and not ray_cluster.is_local_ray_unresponsive()


def test_a_failed_start_is_a_worker_death(monkeypatch: pytest.MonkeyPatch) -> None:
    constants, node = ray_cluster.ray._private.ray_constants, ray_cluster.ray._private.node.Node
    start_monitor = node.start_monitor

    def slow(**how: Any) -> None:
        assert (
            not constants.ENABLE_RAY_CLUSTER and how["address"] == "local" and node.start_monitor is not start_monitor
        )
        raise Exception("The current node timed out during startup.\n  Look into its logs.")

    monkeypatch.setattr(ray_cluster.ray, "init", slow)
    monkeypatch.setattr(ray_cluster, "restrict_network_to_loopback", lambda: None)
    with pytest.raises(ray_cluster.WorkerDied, match="The current node timed") as caught:
        ray_cluster.start_local_cluster()
    assert caught.value.role == "Ray's start" and constants.ENABLE_RAY_CLUSTER and node.start_monitor is start_monitor
