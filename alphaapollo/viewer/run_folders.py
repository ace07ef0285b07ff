"""Find run folders, and describe a run: its kind, its configuration, and whether it is running, finished or failed."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import NamedTuple

import psutil

from alphaapollo.config.changes import identify_command
from alphaapollo.config.load import flatten_maps
from alphaapollo.config.renamed_keys import move_renamed_keys
from alphaapollo.observability.run_view import format_duration
from alphaapollo.processes.folder_lock import read_lock_owner
from alphaapollo.runs.checkpoint_folder import check_format
from alphaapollo.runs.model_card import list_non_default_keys, shorten_path
from alphaapollo.runs.run_history import RunStatus, read_history, read_input_digests, read_run_status
from alphaapollo.utils.disk import read_json, read_yaml
from alphaapollo.utils.json_types import JsonObject
from alphaapollo.utils.redaction import find_secret_keys_and_reasons

MARKERS = ("config.yaml", "metrics.jsonl", "results.jsonl", "pool.jsonl")  # a folder with one of these files is a run
CONTENT = frozenset({"checkpoints", "rollouts", "logs", "model", "recorded", "problems", "__pycache__"})
SILENT_SECONDS, LOST_SECONDS = 30, 600  # without a new status.json
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
    """Whether a run is running, finished, failed, interrupted, killed or unreadable, and why; or what it does."""

    name: str
    reason: str = ""
    seconds_left: float | None = None  # of a run that is running


def find_runs(root: Path) -> Iterator[Path]:
    """Yield the run folders in `root`, or `root` itself. Does not search inside runs and hidden folders."""
    for path, folders, files in os.walk(root, followlinks=True):  # skips what is not readable, or removed meanwhile
        folder = Path(path)
        is_run, depth = not {*folders, *files}.isdisjoint(MARKERS), len(folder.relative_to(root).parts)
        if is_run:
            yield folder
        is_searched = not is_run and depth < MAX_DEPTH
        folders[:] = [name for name in folders if is_searched and not name.startswith(".") and name not in CONTENT]


def read_run_state(folder: Path) -> RunState:
    """Read the state of a run from its format, its lock file, its history and its status."""
    try:
        check_format(folder)
        owner = read_lock_owner(folder)
    except Exception as error:  # noqa: BLE001  the other runs are shown
        return RunState("unreadable", str(error))
    if owner is not None:
        host, pid, status = owner["host"], owner["pid"], read_run_status(folder)
        is_here = host == socket.gethostname()
        if is_here and not (isinstance(pid, int) and 0 < pid < 2**31 and psutil.pid_exists(pid)):
            return RunState("killed", f"process {pid} ended without a message, e.g. because of kill -9")
        process = f"process {pid}" + f" on {host}" * (not is_here)
        if status is None or status.pid != pid:  # not written yet
            return RunState("running", process)
        if not is_here and (silent := time.time() - status.written) > LOST_SECONDS:
            return RunState("killed", f"{process} has not written its status for {format_duration(silent)}")
        return RunState("running", f"{describe_status(status, time.time())} ({process})", status.seconds_left)
    commands = read_history(folder)
    return RunState(commands[-1].state, commands[-1].error) if commands else RunState("ended")


def describe_status(status: RunStatus, now: float) -> str:
    """Describe what a run does, e.g. `generate 12/32 for 0:35, 13,085 of about 40,000 tokens, 3:10 left`."""
    phase = " ".join(filter(None, (status.phase, status.detail)))
    parts = [f"{phase} for {format_duration(now - status.since)}"]
    if status.seconds_left is not None:
        parts.append(f"{format_duration(status.seconds_left)} left")
    if now - status.written > SILENT_SECONDS:
        parts.append(f"no news for {format_duration(now - status.written)}")
    return ", ".join(parts)


def read_json_object(path: Path) -> JsonObject:
    """Read a JSON object; an empty dict if the file is missing, incomplete or damaged."""
    with suppress(OSError, ValueError):
        value = read_json(path)
        return value if isinstance(value, dict) else {}
    return {}


def read_config(folder: Path) -> JsonObject:
    """Read config.yaml; an empty dict if the file is missing, incomplete or damaged."""
    with suppress(OSError):
        return _parse_config(path := folder / "config.yaml", path.stat().st_mtime_ns)
    return {}


@lru_cache(maxsize=4096)
def _parse_config(path: Path, _mtime: int) -> JsonObject:
    with suppress(OSError, ValueError):  # e.g. a date that does not exist
        value = read_yaml(path)
        if isinstance(value, dict):
            move_renamed_keys(value)
            return value
    return {}


def make_run_name(folder: Path, root: Path) -> str:
    """Return the name of a run: its path below the viewed folder, or the folder's name if that is the run."""
    return folder.name if folder == root else str(folder.relative_to(root))


def find_kind(folder: Path) -> str:
    """Return the kind of a run, e.g. "RL"."""
    config = read_config(folder)
    return next((kind for section, kind in KINDS.items() if section in config), "unknown")


def read_flat_config(folder: Path) -> dict[str, str]:
    """Read config.yaml as texts by dotted key: `{"data.seed": "0", ...}`."""
    return _flatten(read_config(folder))


def _flatten(config: JsonObject) -> dict[str, str]:
    return {key: "null" if value is None else str(value) for key, value in flatten_maps(config).items()}


def read_content(folder: Path) -> dict[str, str]:
    """Return beginnings of the digests of a run's inputs: `{"data.train_files (content)": "3f2a91b0", ...}`."""
    inputs = read_input_digests(folder).items()
    return {f"{key} (content)": " ".join(digest[:8] for _, digest in files) for key, files in inputs}


def find_total_steps(folder: Path) -> int | None:
    """Return the number of iterations that the configuration asks for; None if it depends on the data."""
    steps = flatten_maps(read_config(folder)).get("trainer.total_training_steps")
    return steps if isinstance(steps, int) and 0 < steps < 2**63 else None


def describe_algorithm(folder: Path) -> str:
    """Return the name of a run's algorithm: the advantage estimator, or the preference loss; otherwise empty."""
    config = read_flat_config(folder)
    estimator = config.get("algorithm.adv_estimator", "")
    loss = config.get("actor_rollout_ref.actor.policy_loss.loss_mode", "ppo")
    return estimator + (f", {loss}" if loss not in ("ppo", estimator) else "") or config.get("preference.loss", "")


def find_model_name(folder: Path) -> str:
    """Return the name of the model that a run trains."""
    paths = (value for key, value in read_flat_config(folder).items() if key.endswith("model.path"))
    return shorten_path(next((path for path in paths if path not in ("", "null")), ""))


def measure_costs(folder: Path) -> tuple[float, int]:
    """Return the wall time of a run's commands in seconds, also of the one that is running, and its number of GPUs."""
    history, config = read_history(folder), read_flat_config(folder)
    seconds = sum(command.ended - command.started for command in history)
    if (owner := read_lock_owner(folder)) is not None:
        with suppress(TypeError, ValueError):
            seconds += max((datetime.now() - datetime.fromisoformat(owner["since"])).total_seconds(), 0.0)
    sections = ("trainer", "actor_rollout_ref.rollout")  # the second has nodes of its own if its nnodes is not 0
    sizes = [[config.get(f"{section}.{key}", "0") for key in ("n_gpus_per_node", "nnodes")] for section in sections]
    is_cpu = config.get("trainer.device") == "cpu"
    is_cpu |= bool(history) and "+cpu" in history[-1].versions.get("torch", "")
    return seconds, 0 if is_cpu else sum(
        prod(int(size) if size.isdecimal() and len(size) < 10 else 0 for size in pair) for pair in sizes
    )


class KeyRow(NamedTuple):
    """A key of a run's configuration, with its value at each start; None: not set."""

    key: str
    values: list[str | None]
    is_typed: bool  # in the newest command
    is_set: bool  # typed, not the default, or changed by a later start


def tabulate_starts(folder: Path) -> tuple[list[str], list[KeyRow]]:
    """Return the names of a run's configuration files, oldest first, and their keys without those of secrets. A start
    with other values than before writes config.N.yaml."""
    files = [file for file in folder.glob("config.*.yaml") if file.name.split(".")[1].isdecimal()]
    files = [folder / "config.yaml", *sorted(files, key=lambda file: int(file.name.split(".")[1]))]
    starts = {file.name: _flatten(_parse_config(file, file.stat().st_mtime_ns)) for file in files if file.is_file()}
    config, history = read_config(folder), read_history(folder)
    words = history[-1].command.split() if history else []
    typed = {word.lstrip("+~'\"").partition("=")[0] for word in words if "=" in word}
    secrets = {key for values in starts.values() for key, _ in find_secret_keys_and_reasons(values)}
    keys = sorted({key for values in starts.values() for key in values} - secrets)
    command = identify_command(config)
    chosen = {key for key, _ in list_non_default_keys(config, command)} if command else set(keys)
    rows = []
    for key in keys:
        values = [start.get(key) for start in starts.values()]
        rows.append(KeyRow(key, values, key in typed, key in typed or key in chosen or len(set(values)) > 1))
    return list(starts), rows


def find_tokenizer_file(folder: Path) -> Path | None:
    """Find the tokenizer.json of a run: in its exported model, or in the local folder of the model that it trains."""
    config = flatten_maps(read_config(folder))
    prefix = "actor_rollout_ref." if any(key.startswith("actor_rollout_ref.") for key in config) else ""
    candidates = [str(folder / "model"), *(config.get(f"{prefix}model.{key}") for key in ("tokenizer_path", "path"))]
    files = (Path(path) / "tokenizer.json" for path in candidates if isinstance(path, str) and path)
    return next((file for file in files if file.is_file()), None)
