"""Processes that tests start and stop."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from alphaapollo.processes.network import find_connection_error, find_free_port

ROOT = Path(__file__).parents[1]


def run_python(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS`, which can import this repository, to its end."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    command = [sys.executable, *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90, check=False)


@contextmanager
def start_process(*words: str, **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """Process with pipes, which is killed at the end of the block. Without words, it waits for the end of its input."""
    with subprocess.Popen(words or ["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def open_server(*command: object) -> Iterator[str]:
    """Address of a server, whose command gets the port as its last word, until the end of the block."""
    port = find_free_port()
    with subprocess.Popen([*map(str, command), str(port)], stderr=subprocess.DEVNULL) as server:
        try:
            assert wait_until(lambda: not find_connection_error("127.0.0.1", port), 60)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.kill()


def is_running(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 120.0) -> bool:
    """Wait until a condition holds, for so many seconds at most. Returns whether it does."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()
