"""A Ray of our own that has died: nobody is asked any more, and what it has left is ended."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from alphaapollo.controller import ray_crew
from alphaapollo.watchdog import RUN


class Silent:
    """Its callers would wait for ever."""

    async def close(self, cleanup: Any = ()) -> None:
        raise AssertionError("nobody answers")


def test_the_dead_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    gcs, raylet = (subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2))
    info = {
        "gcs_server": [SimpleNamespace(process=gcs)],
        "raylet": [SimpleNamespace(process=raylet)],
        "log_monitor": [],
    }
    monkeypatch.setattr(ray_crew.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray_crew.ray._private.worker, "_global_node", SimpleNamespace(all_processes=info))
    calls: list[str] = []
    monkeypatch.setattr(ray_crew.ray, "shutdown", lambda: calls.append("ray.shutdown"))
    monkeypatch.setattr(ray_crew, "end_processes", lambda run: calls.append(f"end {run}"))
    monkeypatch.setenv(RUN, "7-abc")
    try:
        assert ray_crew.own_processes() == {"Ray's raylet": raylet.pid, "Ray's GCS": gcs.pid}
        assert not ray_crew.own_ray_died()
        gcs.kill()
        gcs.wait()
        assert ray_crew.own_ray_died()
        silent: Any = Silent()
        asyncio.run(ray_crew.end_actors(silent, [silent], [], []))
        assert calls == ["end 7-abc", "ray.shutdown"]
    finally:
        raylet.kill()
        raylet.wait()


def test_a_cluster_that_was_joined_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_crew.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray_crew.ray._private.worker, "_global_node", SimpleNamespace(all_processes={}))
    assert ray_crew.own_processes() == {} and not ray_crew.own_ray_died()
