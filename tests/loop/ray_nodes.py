"""A Ray cluster of two nodes on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from alphaapollo.processes.network import find_free_port
from tests.loop.conftest import DEADLINE


@contextmanager
def two_ray_nodes(folder: Path, monkeypatch: pytest.MonkeyPatch, **variables: str) -> Iterator[None]:
    """Context manager that sets RAY_ADDRESS to a cluster of two nodes with one core each. The second node starts late.
    variables: environment variables for the nodes' processes."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    port = find_free_port()
    (folder / "venv").symlink_to(sys.prefix)  # Ray's head does not start if its path has a space
    start = [str(folder / "venv/bin/python"), "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1"]
    start += ["--node-ip-address=127.0.0.1", "--dashboard-agent-listen-port=0"]
    log, environment = folder / "ray.log", os.environ | variables
    with log.open("w") as out, ExitStack() as nodes:

        def node(*options: str) -> subprocess.Popen[bytes]:
            command = [*start, *options]
            process = nodes.enter_context(subprocess.Popen(command, stdout=out, stderr=out, env=environment))
            nodes.callback(process.terminate)
            return process

        head = node("--head", f"--port={port}", "--include-dashboard=false")
        end = time.monotonic() + DEADLINE
        while "This command will now block" not in log.read_text():
            assert head.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.2)
        other = node(f"--address=127.0.0.1:{port}")  # starts late: the run waits for it
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
        yield
        assert head.poll() is None and other.poll() is None, "the cluster is not ours to end"
