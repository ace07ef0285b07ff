import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path

import psutil
import pytest

from alphaapollo.processes.watchdog import (
    exit_when_process_ends,
    list_mapped_shared_memory,
    remove_paths,
    wait_for_exit,
)
from tests.processes import ROOT, is_running, start_process, wait_until


def follower(pid: int, paths: list[str], ready, memory: str = "") -> None:
    mapped = shared_memory.SharedMemory(memory) if memory else None
    exit_when_process_ends(pid, paths, remove_shared_memory=bool(memory))
    ready.set()
    time.sleep(60)
    del mapped


def start(pid: int, paths: list[str], memory: str = "") -> multiprocessing.Process:
    """A process that follows `pid`, once it does."""
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=follower, args=(pid, paths, ready, memory))
    process.start()
    deadline = time.monotonic() + 10
    while process.is_alive() and not ready.is_set():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process


@pytest.fixture
def leader() -> Iterator[subprocess.Popen[bytes]]:
    with start_process() as process:
        yield process


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


Leader = subprocess.Popen[bytes]


def test_a_follower_dies_and_removes_what_is_left(tmp_path: Path, leader: Leader):
    folder, file = tmp_path / "weights", tmp_path / "lock"
    (folder / "v1").mkdir(parents=True)
    (folder / "v1" / "a").write_text("x")
    file.write_text("x")
    memory = shared_memory.SharedMemory(create=True, size=100)
    mapped = Path("/dev/shm") / memory.name
    assert mapped in list_mapped_shared_memory()
    process = start(leader.pid, [str(folder), str(file), str(tmp_path / "never-was")], memory.name)
    end(leader)
    process.join(20)
    assert process.exitcode == 1
    assert not folder.exists() and not file.exists() and not mapped.exists()
    memory.close()
    resource_tracker.unregister(f"/{memory.name}", "shared_memory")


def test_following_the_dead_ends_at_once(leader: Leader):
    end(leader)
    process = start(leader.pid, [])
    process.join(20)
    assert process.exitcode == 1


def test_remove_paths_takes_links_not_their_targets(tmp_path: Path):
    (tmp_path / "kept").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    remove_paths([tmp_path / "link"])
    assert (tmp_path / "kept").exists() and not (tmp_path / "link").exists()


DRIVER = """
import os, subprocess, sys
from alphaapollo.processes.watchdog import RUN, start_reaper
start_reaper("this-run", sys.argv[1:])
os.environ[RUN] = "this-run"
sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
print(subprocess.Popen(sleep, start_new_session=True).pid, flush=True)
os.environ[RUN] = "another-run"
print(subprocess.Popen(sleep, start_new_session=True).pid, flush=True)
sys.stdin.read()
"""


def test_reaper_ends_only_processes_of_the_run_in_spite_of_signals_of_job_systems(tmp_path: Path):
    (tmp_path / "weights").mkdir()
    with start_process(sys.executable, "-c", DRIVER, str(tmp_path / "weights"), cwd=ROOT) as driver:
        ours, others = (int(driver.stdout.readline()) for _ in range(2))
        (reaper,) = (one for one in psutil.Process(driver.pid).children() if one.pid not in (ours, others))
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        mask = sum(1 << (number - 1) for number in numbers)
        status = Path(f"/proc/{reaper.pid}/status")
        assert wait_until(lambda: int(status.read_text().split("SigIgn:")[1].split()[0], 16) & mask == mask)
        for number in numbers:
            reaper.send_signal(number)
    wait_for_exit(ours)
    assert wait_until(lambda: not (tmp_path / "weights").exists())
    assert is_running(others)
    os.kill(others, signal.SIGKILL)
