"""Find run folders, and describe a run: its kind, its configuration, and whether it is running, finished or failed."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any

import psutil
from safetensors import SafetensorError, safe_open

from alphaapollo.config.changes import identify_command
from alphaapollo.config.keys import flatten_maps
from alphaapollo.config.renamed_keys import move_renamed_keys
from alphaapollo.observability.metric_texts import format_duration
from alphaapollo.processes.folder_lock import read_lock_owner
from alphaapollo.runs.checkpoint_folder import check_format
from alphaapollo.runs.command_history import read_history
from alphaapollo.runs.model_card import list_non_default_keys, shorten_path
from alphaapollo.runs.run_plan import read_input_digests, read_run_plan
from alphaapollo.runs.run_status import RunStatus, read_run_status
from alphaapollo.runs.update_checks import read_checks
from alphaapollo.utils.disk import open_regular, read_json, read_yaml
from alphaapollo.utils.json_types import JsonObject

MARKERS = ("config.yaml", "metrics.jsonl", "results.jsonl", "pool.jsonl")  # a folder with one of these files is a run
TO_REPRODUCE = "to_reproduce"  # folder of a sweep with what `alphaapollo reproduce` reads of its runs
FOLDERS_OF_RUNS = frozenset(
    {"checkpoints", "rollouts", "logs", "model", "recorded", "problems", "__pycache__", TO_REPRODUCE}
)
CONTENT = " (content)"
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
    """Yield the run folders in `root`, or `root` itself. Does not search inside runs, links, hidden folders, and
    folders with the name of a run's own folder (FOLDERS_OF_RUNS)."""
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
                if not entry.name.startswith(".") and entry.name not in FOLDERS_OF_RUNS
                if entry.is_dir(follow_symlinks=False)
            ]


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
    if status.expected_tokens and status.tokens:
        parts.append(f"{status.tokens:,} of about {status.expected_tokens:,.0f} tokens")
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
    """Read the newest saved configuration; an empty dict if the file is missing, incomplete or damaged."""
    with suppress(OSError, IndexError):
        return _parse_config(path := _list_config_files(folder)[-1], path.stat().st_mtime_ns)
    return {}


def _list_config_files(folder: Path) -> list[Path]:
    """Return the saved configurations of a run, oldest first: a start with other values writes config.N.yaml."""
    files = [file for file in folder.glob("config.*.yaml") if file.name.split(".")[1].isdecimal()]
    files = [folder / "config.yaml", *sorted(files, key=lambda file: int(file.name.split(".")[1]))]
    return [file for file in files if file.is_file()]


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
    config, flat = read_config(folder), read_flat_config(folder)
    if flat.get("algorithm.adv_estimator") == "none" and flat.get("teacher.divergence", "null") == "null":
        return "own loop"  # main_ppo refuses these values
    return next((kind for section, kind in KINDS.items() if section in config), "unknown")


def read_flat_config(folder: Path) -> dict[str, str]:
    """Read the newest configuration as texts by dotted key: `{"data.seed": "0", ...}`."""
    return _flatten(read_config(folder))


def _flatten(config: JsonObject) -> dict[str, str]:
    return {key: "null" if value is None else str(value) for key, value in flatten_maps(config).items()}


def read_content(folder: Path) -> dict[str, str]:
    """Return the beginning of the digest of each of a run's inputs, `{"data.train_files (content)": "3f2a91b0", ...}`,
    or of the digest of all digests if it has several files."""
    inputs = {key: [digest for _, digest in files] for key, files in read_input_digests(folder).items()}
    joined = {
        key: digests[0] if len(digests) == 1 else sha256(str(digests).encode()).hexdigest()
        for key, digests in inputs.items()
    }
    return {f"{key}{CONTENT}": digest[:8] for key, digest in joined.items()}


def read_settings(folder: Path) -> dict[str, str]:
    """Return the newest configuration and the digests of the inputs, which tell runs apart, as texts by key."""
    return read_flat_config(folder) | read_content(folder)


def read_set_keys(folder: Path) -> dict[str, Any]:
    """Return the keys whose values are not the defaults of the run's command; empty if the command is unknown."""
    command = identify_command(config := read_config(folder))
    return dict(list_non_default_keys(config, command)) if command else {}


def list_checks(folder: Path) -> Iterator[tuple[str, ...]]:
    """Yield (quantity, deviation, tolerance, verdict, where, reason) of the verified update."""
    for one in read_checks(folder):
        numbers = (f"{one.deviation:.1e}", f"{one.tolerance:.0e}") if one.covered else ("", "")
        yield one.quantity, *numbers, one.verdict, one.where, one.reason


def find_total_steps(folder: Path) -> int | None:
    """Return the number of iterations that the configuration asks for; None if it depends on the data."""
    steps = flatten_maps(read_config(folder)).get("trainer.total_training_steps")
    return steps if isinstance(steps, int) and 0 < steps < 2**63 else None


def describe_algorithm(folder: Path) -> str:
    """Return the name of a run's algorithm: the advantage estimator and the policy loss, or the preference loss;
    otherwise empty."""
    config = read_flat_config(folder)
    names = [config.get("algorithm.adv_estimator", ""), config.get("actor_rollout_ref.actor.policy_loss.loss_mode", "")]
    shown = {name: "distillation" if name == "none" else name for name in names if name not in ("", "ppo")}
    if find_kind(folder) == "own loop":
        del shown["none"]
    return ", ".join(shown.values()) or config.get("preference.loss", "")


def describe_model(folder: Path) -> tuple[str, float | None]:
    """Return the name of the model that a run trains, and its number of parameters if it is known: from the files of
    the model, or from its name."""
    paths = (value for key, value in read_flat_config(folder).items() if key.endswith("model.path"))
    path = next((path for path in paths if path not in ("", "null")), "")
    files = [file for place in (folder / "model", Path(path)) if path for file in place.glob("*.safetensors")]
    counts = [count_parameters(file, file.stat().st_mtime_ns) for file in files if file.parent == files[0].parent]
    size = re.search(r"(?<![\w.])(\d+(?:\.\d+)?)([MB])(?![a-z])", path.rpartition("/")[2].replace("-", " "))
    named = float(size[1]) * {"M": 1e6, "B": 1e9}[size[2]] if size else None
    return shorten_path(path), sum(counts) or named


@lru_cache(maxsize=4096)
def count_parameters(file: Path, _mtime: int) -> int:
    """Count the parameters in a file of weights from its header; 0 if it is damaged."""
    with suppress(OSError, SafetensorError), open_regular(file.resolve()), safe_open(file, "numpy") as opened:
        return sum(prod(opened.get_slice(name).get_shape()) for name in opened.keys())  # noqa: SIM118
    return 0


def measure_costs(folder: Path) -> tuple[float, int]:
    """Return the wall time of a run's commands in seconds, also of the one that is running, and its number of GPUs."""
    history, config = read_history(folder), read_flat_config(folder)
    seconds = sum(command.ended - command.started for command in history)
    if (owner := read_lock_owner(folder)) is not None:
        with suppress(TypeError, ValueError):
            seconds += max((datetime.now() - datetime.fromisoformat(owner["since"])).total_seconds(), 0.0)
    sections = ("trainer", "actor_rollout_ref.rollout")  # the second has nodes of its own if its nnodes is not 0
    sizes = [[config.get(f"{section}.{key}", "0") for key in ("n_gpus_per_node", "nnodes")] for section in sections]
    plan = read_run_plan(folder)
    is_cpu = config.get("trainer.device") == "cpu"
    is_cpu |= plan is not None and plan.memory is not None and "GPU" not in plan.memory.device
    is_cpu |= bool(history) and "+cpu" in history[-1].versions.get("torch", "")
    return seconds, 0 if is_cpu else sum(
        prod(int(size) if size.isdecimal() and len(size) < 10 else 0 for size in pair) for pair in sizes
    )


def list_config_starts(folder: Path) -> list[tuple[str, dict[str, str]]]:
    """Return the saved configurations of a run, oldest first, as (file, texts by key)."""
    files = _list_config_files(folder)
    return [(file.name, _flatten(_parse_config(file, file.stat().st_mtime_ns))) for file in files]


def find_tokenizer_file(folder: Path) -> Path | None:
    """Find the tokenizer.json of a run: in its exported model, or in the local folder of the model that it trains."""
    config = flatten_maps(read_config(folder))
    prefix = "actor_rollout_ref." if any(key.startswith("actor_rollout_ref.") for key in config) else ""
    candidates = [str(folder / "model"), *(config.get(f"{prefix}model.{key}") for key in ("tokenizer_path", "path"))]
    files = (Path(path) / "tokenizer.json" for path in candidates if isinstance(path, str) and path)
    return next((file for file in files if file.is_file()), None)
