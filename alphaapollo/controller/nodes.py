"""Check that a cluster has enough nodes for a run, with the same versions and files. Does not import Ray."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from alphaapollo._version import __version__
from alphaapollo.config.schema import GenerationTrainer, Rollout, Trainer, TuningTrainer
from alphaapollo.utils.versions import find_version

LIBRARIES = ("torch", "transformers", "vllm", "ray")
NOTHING = "none"
TrainerSection = Trainer | TuningTrainer | GenerationTrainer
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
class NodeContents:
    """Versions and files on a node, to compare nodes."""

    host: str
    versions: Mapping[str, str]  # name of Python or of a library -> version; NOTHING: not installed
    file_counts_and_bytes: Mapping[str, tuple[int, int] | None]  # by config key; None: no such path


def describe_missing_nodes(
    nodes: Sequence[ClusterNode], trainer: TrainerSection, rollout: Rollout | None = None
) -> str:
    """Return a message if fewer nodes have joined than the run needs (trainer.nnodes and, for engines only,
    rollout.nnodes), else "". rollout: section of the engines of an RL run."""
    on_gpus = trainer.device == "cuda" or (trainer.device == "auto" and any(node.gpus for node in nodes))
    gpus, engine_nodes = trainer.n_gpus_per_node, rollout.nnodes if rollout else 0
    engine_gpus = (rollout.n_gpus_per_node if rollout else None) or gpus
    wanted = sorted([*[gpus] * trainer.nnodes, *[engine_gpus] * engine_nodes], reverse=True)
    given = sorted((node.gpus for node in nodes), reverse=True)
    if len(given) >= len(wanted) and not (on_gpus and any(map(int.__lt__, given, wanted))):
        return ""
    fit = [node for node in nodes if not on_gpus or node.gpus >= wanted[-1]]
    few = [node for node in nodes if node not in fit]
    keys = f"trainer.nnodes={trainer.nnodes}"
    keys += f" and actor_rollout_ref.rollout.nnodes={engine_nodes}" if engine_nodes else ""
    each = f" with {' and '.join(map(str, dict.fromkeys(wanted)))} GPUs" if on_gpus else ""
    others = f"; with fewer GPUs: {', '.join(map(str, few))}" if few else ""
    return (
        f"{keys} needs {len(wanted)} node(s){each}, but {len(fit)} have joined: {', '.join(map(str, fit)) or 'none'}"
        f"{others}"
    )


def inspect_node(paths: Mapping[str, str], base_folder: str) -> NodeContents:
    """Return this node's library versions, and the number and size of the files at each of `paths`.
    paths: configuration key -> path, absolute or relative to `base_folder`."""
    files = {key: _count_files_and_bytes(Path(base_folder, path)) for key, path in paths.items()}
    versions = {name: (find_version(name) or NOTHING).split("+")[0] for name in LIBRARIES}  # without build (+cpu)
    own = {"Python": platform.python_version(), "alphaapollo": compute_code_version()}
    return NodeContents(platform.node(), own | versions, files)


@cache
def compute_code_version() -> str:
    """Return the version of alphaapollo and a digest of its files, because checkouts of one version may differ."""
    root, digest = Path(__file__).resolve().parents[1], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return f"{__version__} (files {digest.hexdigest()[:8]})"


def describe_node_differences(node: NodeContents, driver: NodeContents, paths: Mapping[str, str]) -> list[str]:
    """Return one message with a fix for each difference between `node` and the driver's node."""
    other = [
        f"{name} is {node.versions.get(name, NOTHING)}, not {version}"
        for name, version in driver.versions.items()
        if node.versions.get(name, NOTHING) != version
    ]
    lines = []
    if other:
        lines.append(f"{', '.join(other)}. Use the same environment on all nodes: one .venv or one image.")
    for key, here in driver.file_counts_and_bytes.items():
        there = node.file_counts_and_bytes[key]
        if key == RUN_FOLDER and there != here:
            lines.append(f"{key}: {paths[key]} is a different file there. Set it to a folder that all nodes share.")
        elif there is None:
            lines.append(f"{key}={paths[key]} does not exist there. Copy it to the same path, or use a shared folder.")
        elif there != here:
            lines.append(f"{key}={paths[key]} has {_format_files(there)}, not {_format_files(here)}. Copy it again.")
    return lines


RUN_FOLDER = "trainer.output_dir"  # key of a file that the driver has just written


def _count_files_and_bytes(path: Path) -> tuple[int, int] | None:
    """Return (number of files, their total bytes) at `path`, a file or a folder; None if the path does not exist."""
    if not path.exists():
        return None
    files = [path] if path.is_file() else list(path.iterdir())
    sizes = [file.stat().st_size for file in files if file.suffix in COMPARED and file.is_file()]
    return len(sizes), sum(sizes)


def _format_files(count_and_bytes: tuple[int, int] | None) -> str:
    number, num_bytes = count_and_bytes or (0, 0)
    return f"{number} file(s) of {num_bytes:,} bytes"
