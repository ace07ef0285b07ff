"""The fork server that a driver shares with its workers: who forks from it, and that it ends with the command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil

from alphaapollo.processes.fork_server import SHARED, share_fork_server
from alphaapollo.processes.watchdog import RUN, new_run_id

WORKER = """
import multiprocessing, os, sys
from alphaapollo.processes.fork_server import ForkedContext, start_fork_server

start_fork_server("decimal", ["decimal"], {"KIND": sys.argv[1]})
with ForkedContext().Pool(1) as pool:
    print(pool.apply(os.getppid), pool.apply(os.getenv, ["OWN"]))
"""


def find_parent_of_forked(kind: str) -> tuple[int, str]:
    """Fork a process in a worker, and return the parent's pid and a variable of the forked process."""
    command = [sys.executable, "-c", WORKER, kind]
    done = subprocess.run(command, env=dict(os.environ, OWN="value"), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    pid, variable = done.stdout.split()
    return int(pid), variable


def test_workers_fork_from_the_shared_server_if_it_has_their_variables() -> None:
    with share_fork_server(["decimal"], ["decimal"], {"KIND": "a"}):
        server = psutil.Process(int(os.environ[SHARED].split()[0]))
        assert find_parent_of_forked("a") == find_parent_of_forked("a") == (server.pid, "value")
        assert find_parent_of_forked("b")[0] != server.pid
        assert server.environ()[RUN] == new_run_id()  # so the end of the run finds its processes
        server.send_signal(signal.SIGKILL)
        server.wait(timeout=10)
        parent, variable = find_parent_of_forked("a")
        assert (parent != server.pid, variable) == (True, "value")
    assert SHARED not in os.environ


def test_the_shared_server_ends_with_the_command() -> None:
    with share_fork_server(["decimal"], ["decimal"], {"KIND": "a"}):
        server = psutil.Process(int(os.environ[SHARED].split()[0]))
    assert not server.is_running()
