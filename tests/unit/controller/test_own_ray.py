"""A Ray of our own that has died: nobody is asked any more, and what it has left is ended."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from alphaapollo.controller import ray_crew
from alphaapollo.utils.heartbeat import read_process
from alphaapollo.utils.watchdog import RUN

Process = subprocess.Popen[bytes]


class Silent:
    """Its callers would wait for ever."""

    async def close(self, cleanup: Any = ()) -> None:
        raise AssertionError("nobody answers")


@pytest.fixture
def own_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Process, Process]]:
    """Its GCS and its raylet."""
    gcs, raylet = (subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2))
    info = {
        "gcs_server": [SimpleNamespace(process=gcs)],
        "raylet": [SimpleNamespace(process=raylet)],
        "log_monitor": [],
    }
    monkeypatch.setattr(ray_crew.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray_crew.ray._private.worker, "_global_node", SimpleNamespace(all_processes=info))
    yield gcs, raylet
    for process in (gcs, raylet):
        process.kill()
        process.wait()


def test_its_death_ends_a_start_as_what_it_is(own_ray: tuple[Process, Process]) -> None:
    gcs, _ = own_ray

    async def start() -> None:
        gcs.kill()
        await asyncio.sleep(60)

    async def begin(seconds: float) -> None:
        async with ray_crew.starting(seconds):
            await start()

    with pytest.raises(ray_crew.WorkerDied, match=rf"Ray's GCS on this machine \(pid {gcs.pid}\) died"):
        asyncio.run(begin(30))


def test_the_dead_are_not_asked(own_ray: tuple[Process, Process], monkeypatch: pytest.MonkeyPatch) -> None:
    gcs, raylet = own_ray
    calls: list[str] = []
    monkeypatch.setattr(ray_crew.ray, "shutdown", lambda: calls.append("ray.shutdown"))
    monkeypatch.setattr(ray_crew, "end_processes", lambda run: calls.append(f"end {run}"))
    monkeypatch.setenv(RUN, "7-abc")
    assert ray_crew.own_processes() == {"Ray's raylet": raylet.pid, "Ray's GCS": gcs.pid}
    assert not ray_crew.own_ray_silent()
    raylet.send_signal(signal.SIGSTOP)
    while not (seen := read_process(raylet.pid)) or not seen.stopped:
        time.sleep(0.01)
    assert ray_crew.own_ray_silent()
    raylet.send_signal(signal.SIGCONT)
    gcs.kill()
    gcs.wait()
    assert ray_crew.own_ray_silent()
    silent: Any = Silent()
    asyncio.run(ray_crew.end_actors(silent, [silent], [], []))
    assert calls == ["end 7-abc", "ray.shutdown"]


def test_a_cluster_that_was_joined_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_crew.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray_crew.ray._private.worker, "_global_node", SimpleNamespace(all_processes={}))
    assert ray_crew.own_processes() == {} and not ray_crew.own_ray_silent()


def test_one_that_does_not_start_is_one_error_after_which_the_run_may_be_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    constants = ray_crew.ray._private.ray_constants

    def slow(**how: Any) -> None:
        assert not constants.ENABLE_RAY_CLUSTER and how["address"] == "local"
        raise Exception("The current node timed out during startup.\n  Look into its logs.")

    monkeypatch.setattr(ray_crew.ray, "init", slow)
    monkeypatch.setattr(ray_crew, "stay_on_loopback", lambda: None)
    with pytest.raises(ray_crew.WorkerDied, match=r"does not start.*: The current node timed .* Look into") as caught:
        ray_crew.start_local_cluster()
    assert caught.value.who == "Ray's start" and constants.ENABLE_RAY_CLUSTER
