"""A recorded iteration on disk: what its learning got, and what came out.

<run>/recorded/step_000003/   written whole before the step; manifest.json has the digest of each file
    recording.json            format, kl_coef, how the run computed and on what machine
    config.yaml               the run's
    groups.msgpack            the trajectory groups
    policy/  critic/          as in a checkpoint: weights, moments, a reference that was reset
    outcome/                  after it: outcome.json, columns.npz, and a manifest of their own
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from alphaapollo.launch.checkpoint_folder import MANIFEST, damage, seal
from alphaapollo.observability.json_values import plain
from alphaapollo.types import TrajectoryGroup

FORMAT = 1
FOLDER = "recorded"  # of a run
ABOUT, GROUPS, OUTCOME = "recording.json", "groups.msgpack", "outcome"
ARRAY = 1  # msgpack's code for numpy's


@dataclass(frozen=True)
class About:
    """How the run computed the iteration."""

    step: int
    iterations: int  # of the whole run, for the schedules of learning rates
    kl_coef: float  # of the KL in the reward
    shares_prompts: bool
    ranks: int  # that trained
    threads: int  # of each
    device: str
    model: dict[str, Any]  # the section of the policy's, all chosen
    machine: dict[str, str]  # what the bits depend on besides
    reference_ahead: bool = False  # its log-probs were computed group by group


@dataclass(frozen=True)
class Outcome:
    """What came out of an iteration's learning."""

    figures: dict[str, float]
    fingerprints: dict[str, tuple[str, float]]  # "policy weights": digest and norm after the last optimiser step
    columns: dict[str, np.ndarray]  # of the action tokens, row after row: advantages, log-probs, ...
    error: str = ""  # what it ended with; then there is nothing else


@dataclass(frozen=True)
class Recording:
    """One that was read."""

    folder: Path
    about: About
    groups: list[TrajectoryGroup]
    outcome: Outcome | None  # None: the run ended before there was one


def write_inputs(folder: Path, about: About, groups: Sequence[TrajectoryGroup]) -> None:
    """All but config.yaml and the workers' parts."""
    (folder / GROUPS).write_bytes(_encoded(groups))
    (folder / ABOUT).write_text(json.dumps({"format": FORMAT, **asdict(about)}, indent=1) + "\n")


def write_outcome(recording: Path, outcome: Outcome) -> None:
    """Beside the inputs of a whole recording."""
    folder = recording / OUTCOME
    folder.mkdir()
    np.savez(folder / "columns.npz", **outcome.columns)  # type: ignore[arg-type]
    said = {name: value for name, value in asdict(outcome).items() if name != "columns"}
    (folder / "outcome.json").write_text(json.dumps(said, indent=1) + "\n")
    seal(folder)


def read_recording(folder: Path) -> Recording:
    """ValueError: there is none, it is damaged, or of another version."""
    if not (folder / ABOUT).is_file() or not (folder / MANIFEST).is_file():
        raise ValueError(f"{folder} is no whole recording of an iteration.{_others(folder)}")
    outcome = folder / OUTCOME
    there = (outcome / MANIFEST).is_file()
    problems = damage(folder) + ([f"{OUTCOME}/{line}" for line in damage(outcome)] if there else [])
    if problems:
        raise ValueError(f"{folder} is damaged: {', '.join(problems)}. Take a sound copy, or record it again.")
    about = json.loads((folder / ABOUT).read_text())
    if (written := about.pop("format", None)) != FORMAT:
        raise ValueError(
            f"{folder} is a recording of format {written}; this version reads format {FORMAT}. Replay it with the "
            "version that recorded it."
        )
    groups = msgspec.msgpack.decode(
        (folder / GROUPS).read_bytes(), type=list[TrajectoryGroup], ext_hook=lambda _, data: _array(data)
    )
    return Recording(folder, About(**about), groups, _read_outcome(outcome) if there else None)


def _read_outcome(folder: Path) -> Outcome:
    said = json.loads((folder / "outcome.json").read_text())
    with np.load(folder / "columns.npz") as columns:
        return Outcome(columns=dict(columns), **said)


def _others(folder: Path) -> str:
    found = sorted(path.parent for pattern in (f"*/{ABOUT}", f"*/*/{ABOUT}") for path in folder.glob(pattern))
    whole = [str(path) for path in found if not path.name.startswith(".")]
    if whole:
        return f" Give one of those in it: {', '.join(whole)}."
    return f" Give a folder <run>/{FOLDER}/step_N, as trainer.record_steps=[N] writes it."


def _encoded(groups: Sequence[TrajectoryGroup]) -> bytes:
    try:
        return msgspec.msgpack.encode(groups, enc_hook=_encodable)
    except UnicodeEncodeError:  # half a surrogate pair, from an environment, say, which UTF-8 does not have
        return msgspec.msgpack.encode(_readable(groups), enc_hook=_encodable)


def _encodable(value: Any) -> Any:
    if isinstance(value, array):
        return value.tolist()
    if isinstance(value, np.ndarray) and value.dtype != object:
        parts = (value.dtype.str, value.shape, value.tobytes())
        return msgspec.msgpack.Ext(ARRAY, msgspec.msgpack.encode(parts))
    return plain(value)


def _array(data: memoryview) -> np.ndarray:
    dtype, shape, values = msgspec.msgpack.decode(data)
    return np.frombuffer(values, np.dtype(dtype)).reshape(shape)


def _readable(value: Any) -> Any:
    """The same with texts that UTF-8 has."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_readable(key): _readable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_readable(inner) for inner in value]
    if is_dataclass(value):
        return {one.name: _readable(getattr(value, one.name)) for one in fields(value)}
    return value
