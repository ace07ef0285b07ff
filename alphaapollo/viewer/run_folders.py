"""Find run folders, and describe a run: its kind, its configuration, and whether it is running, finished or failed."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import psutil
import yaml

from alphaapollo.config.load import flatten_maps
from alphaapollo.config.renamed_keys import move_renamed_keys
from alphaapollo.processes.folder_lock import read_lock_owner
from alphaapollo.runs.checkpoint_folder import check_format
from alphaapollo.runs.run_history import read_history, read_input_digests
from alphaapollo.utils.json_types import JsonObject

MARKERS = ("config.yaml", "metrics.jsonl", "results.jsonl", "pool.jsonl")  # a folder with one of these files is a run
CONTENT = frozenset({"checkpoints", "rollouts", "logs", "model", "recorded", "problems", "__pycache__"})
MAX_DEPTH = 4  # levels below the given folder that are searched
KINDS = {  # section of config.yaml -> kind of run; the first one that exists decides
    "actor_rollout_ref": "RL",
    "models": "evolution",
    "preference": "preferences",
    "bradley_terry": "reward model",
    "optim": "SFT",
    "rollout": "evaluation",
}


@dataclass(frozen=True)
class RunState:
    """Whether a run is running, finished, failed, interrupted, killed or unreadable, and why."""

    name: str
    reason: str = ""


def find_runs(root: Path) -> Iterator[Path]:
    """Yield the run folders in `root`, or `root` itself. Does not search inside runs and hidden folders."""
    pending = [(root, 0)]
    while pending:
        folder, depth = pending.pop()
        try:
            entries = list(os.scandir(folder))
        except OSError:
            continue  # not readable, or removed meanwhile
        if any(entry.name in MARKERS for entry in entries):
            yield folder
        elif depth < MAX_DEPTH:
            pending += [
                (Path(entry.path), depth + 1)
                for entry in entries
                if not entry.name.startswith(".") and entry.name not in CONTENT and entry.is_dir()
            ]


def read_run_state(folder: Path) -> RunState:
    """Read the state of a run from its format, its lock file and its history."""
    try:
        check_format(folder)
        owner = read_lock_owner(folder)
    except Exception as error:  # noqa: BLE001  the other runs are shown
        return RunState("unreadable", str(error))
    if owner is not None:
        host, pid = owner["host"], owner["pid"]
        if host != socket.gethostname():
            return RunState("running", f"on {host}")
        if isinstance(pid, int) and 0 < pid < 2**31 and psutil.pid_exists(pid):
            return RunState("running", f"process {pid}")
        return RunState("killed", f"process {pid} ended without a message, e.g. because of kill -9")
    commands = read_history(folder)
    return RunState(commands[-1].state, commands[-1].error) if commands else RunState("ended")


def read_json_object(path: Path) -> JsonObject:
    """Read a JSON object; an empty dict if the file is missing, incomplete or damaged."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def read_config(folder: Path) -> JsonObject:
    """Read config.yaml; an empty dict if the file is missing, incomplete or damaged."""
    path = folder / "config.yaml"
    try:
        stat = path.stat()
    except OSError:
        return {}
    return _parse_config(path, stat.st_mtime_ns)


@lru_cache(maxsize=4096)
def _parse_config(path: Path, _mtime: int) -> JsonObject:
    try:
        value = yaml.load(path.read_bytes(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, ValueError, TypeError, RecursionError, yaml.YAMLError):  # e.g. a date that does not exist
        return {}
    if not isinstance(value, dict):
        return {}
    move_renamed_keys(value)
    return value


def make_run_name(folder: Path, root: Path) -> str:
    """Return the name of a run: its path below the viewed folder, or the folder's name if that is the run."""
    return folder.name if folder == root else str(folder.relative_to(root))


def find_kind(folder: Path) -> str:
    """Return the kind of a run, e.g. "RL"."""
    config = read_config(folder)
    return next((kind for section, kind in KINDS.items() if section in config), "unknown")


def read_flat_config(folder: Path) -> dict[str, str]:
    """Read config.yaml as texts by dotted key: `{"data.seed": "0", ...}`."""
    return {key: "" if value is None else str(value) for key, value in flatten_maps(read_config(folder)).items()}


def read_content(folder: Path) -> dict[str, str]:
    """Return beginnings of the digests of a run's inputs: `{"data.train_files (content)": "3f2a91b0", ...}`."""
    inputs = read_input_digests(folder).items()
    return {f"{key} (content)": " ".join(digest[:8] for _, digest in files) for key, files in inputs}


def find_total_steps(folder: Path) -> int | None:
    """Return the number of iterations that the configuration asks for; None if it depends on the data."""
    steps = flatten_maps(read_config(folder)).get("trainer.total_training_steps")
    return steps if isinstance(steps, int) and 0 < steps < 2**63 else None


def find_tokenizer_file(folder: Path) -> Path | None:
    """Find the tokenizer.json of a run: in its exported model, or in the local folder of the model that it trains."""
    config = flatten_maps(read_config(folder))
    prefix = "actor_rollout_ref." if any(key.startswith("actor_rollout_ref.") for key in config) else ""
    candidates = [str(folder / "model"), *(config.get(f"{prefix}model.{key}") for key in ("tokenizer_path", "path"))]
    files = (Path(one) / "tokenizer.json" for one in candidates if isinstance(one, str) and one)
    return next((file for file in files if file.is_file()), None)
