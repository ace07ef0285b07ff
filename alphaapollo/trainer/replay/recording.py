"""Files of a recorded iteration.

<run>/recorded/step_000003/   written completely before the update; manifest.json has the digest of each file
    format.json               format (runs/checkpoint_folder.py)
    recording.json            kl_coef, machine and parallelism of the run
    config.yaml               configuration of the run
    groups.msgpack            trajectory groups, without the pixels of images
    images.msgpack            pixels of each distinct image by its digest; only if there are images
    policy/  critic/          as in a checkpoint: weights, optimizer moments, reference if it was reset
    outcome/                  written after the update: outcome.json, columns.npz and a second manifest
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import numpy as np

from alphaapollo.runs.checkpoint_folder import MANIFEST, check_format, find_damage, write_manifest
from alphaapollo.trainer.groups_file import read_groups, write_groups
from alphaapollo.types import JsonObject, TrajectoryGroup

FOLDER = "recorded"  # name of the subfolder of a run
INFO, OUTCOME = "recording.json", "outcome"


@dataclass(frozen=True)
class RecordingInfo:
    """Content of recording.json: settings and machine with which the run computed the iteration."""

    step: int
    iterations: int  # total of the run, for learning rate schedules
    kl_coef: float  # coefficient of the KL penalty in the reward
    shares_prompts: bool
    ranks: int  # training ranks
    threads: int  # threads per rank
    device: str
    model: JsonObject  # resolved section of the policy's model
    machine: dict[str, str]  # processor and library versions
    max_tokens: int = 16384  # token budget of a micro-batch


@dataclass(frozen=True)
class LearningOutcome:
    """Result of an iteration's update, as recorded or as replayed."""

    metrics: dict[str, float]
    fingerprints: dict[str, tuple[str, float]]  # "policy weights": digest and norm after the last optimizer step
    columns: dict[str, np.ndarray]  # advantages, log-probs, ... of the action tokens, in row order
    error: str = ""  # message of the error that ended the update; all other fields are then empty


@dataclass(frozen=True)
class Recording:
    """Recorded iteration, read from its folder <run>/recorded/step_N."""

    folder: Path
    info: RecordingInfo
    groups: list[TrajectoryGroup]
    outcome: LearningOutcome | None  # None: the run ended before it was written


def write_inputs(folder: Path, info: RecordingInfo, groups: Sequence[TrajectoryGroup]) -> None:
    """Write the settings (recording.json) and rollout groups of a recorded iteration."""
    write_groups(folder, groups)
    (folder / INFO).write_text(json.dumps(asdict(info), indent=1) + "\n")


def write_outcome(recording_folder: Path, outcome: LearningOutcome) -> None:
    """Write an update's result to the subfolder outcome/ of its recording."""
    folder = recording_folder / OUTCOME
    folder.mkdir()
    np.savez(folder / "columns.npz", **outcome.columns)  # type: ignore[arg-type]
    values = {"figures": outcome.metrics, "fingerprints": outcome.fingerprints, "error": outcome.error}
    (folder / "outcome.json").write_text(json.dumps(values, indent=1) + "\n")
    write_manifest(folder)


def read_recording(folder: Path) -> Recording:
    """Read and verify a recorded iteration. Raises ValueError if it is missing, damaged or in an unsupported format."""
    check_format(folder)
    if not (folder / INFO).is_file() or not (folder / MANIFEST).is_file():
        raise ValueError(
            f"{folder} is not a complete recording of an iteration. Use a folder <run>/{FOLDER}/step_N, which "
            "trainer.record_steps=[N] writes."
        )
    outcome = folder / OUTCOME
    has_outcome = (outcome / MANIFEST).is_file()
    problems = find_damage(folder) + ([f"{OUTCOME}/{line}" for line in find_damage(outcome)] if has_outcome else [])
    if problems:
        raise ValueError(f"{folder} is damaged: {', '.join(problems)}. Use an intact copy, or a new recording.")
    result: LearningOutcome | None = None
    if has_outcome:
        values = json.loads((outcome / "outcome.json").read_text())
        fingerprints = {name: (digest, norm) for name, (digest, norm) in values["fingerprints"].items()}
        with np.load(outcome / "columns.npz") as columns:
            result = LearningOutcome(values["figures"], fingerprints, dict(columns), values["error"])
    info = msgspec.json.decode((folder / INFO).read_bytes(), type=RecordingInfo)
    return Recording(folder, info, read_groups(folder), result)
