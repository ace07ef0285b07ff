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


def inspect_node(paths: Mapping[str, str], base_folder: str) -> dict[str, str]:
    """Return the versions of Python and libraries on this node, and the number and size of the files at each of
    `paths`. paths: configuration key -> path, absolute or relative to `base_folder`."""
    versions = {name: (find_version(name) or NOTHING).split("+")[0] for name in LIBRARIES}  # without build (+cpu)
    own = {"Python": platform.python_version(), "alphaapollo": compute_code_version()}
    return own | versions | {f"{key}={path}": _describe_files(Path(base_folder, path)) for key, path in paths.items()}


@cache
def compute_code_version() -> str:
    """Return the version of alphaapollo and a digest of its files, because checkouts of one version may differ."""
    root, digest = Path(__file__).resolve().parents[1], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return f"{__version__} (files {digest.hexdigest()[:8]})"


def describe_node_differences(node: Mapping[str, str], driver: Mapping[str, str]) -> str:
    """Return what differs between the results of inspect_node on a node and on the driver's node, or ""."""
    return ", ".join(f"{name} is {node[name]}, not {value}" for name, value in driver.items() if node[name] != value)


RUN_FOLDER = "trainer.output_dir"  # key of a file that the driver has just written


def _describe_files(path: Path) -> str:
    """Return e.g. "3 files of 5,000 bytes": the files at `path`, a file or a folder."""
    if not path.exists():
        return "missing"
    files = [path] if path.is_file() else list(path.iterdir())
    sizes = [file.stat().st_size for file in files if file.suffix in COMPARED and file.is_file()]
    return f"{len(sizes)} files of {sum(sizes):,} bytes"
