"""Files of a recorded iteration, and their reader.

<run>/recorded/step_000003/   written completely before the update; manifest.json has the digest of each file
    config.yaml               configuration of the run
    inputs.msgpack            RecordedInputs: rollout groups, values of `auto` settings, machine
    policy/  critic/          as in a checkpoint: weights, optimizer moments, reference if it was reset
    outcome/                  written after the update: outcome.msgpack, mini-batches (steps.msgpack), a second manifest
        policy/  critic/      gradients and new weights (models/update_record.py)
    published.json            written after the weight sync: the engines' log-probs of the probe
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.torch import load_file
from torch import Tensor

from alphaapollo.models.checkpoint import read_all_tensors
from alphaapollo.runs.checkpoint_folder import MANIFEST, check_format, find_damage, write_manifest
from alphaapollo.runs.group_files import read_values, write_values
from alphaapollo.runs.metrics_file import read_metrics
from alphaapollo.types import JsonObject, TrajectoryGroup
from alphaapollo.utils.disk import explain_damage, read_json, read_yaml

INPUTS, OUTCOME, PUBLISHED = "inputs.msgpack", "outcome", "published.json"
VALUES, STEPS = "outcome.msgpack", "steps.msgpack"  # in the folder OUTCOME
Value = float | np.ndarray | tuple[str, float]
"""Metric, column of the action tokens in row order, or (digest, norm) of weights or optimizer moments."""
Outcome = dict[str, Value]
"""Result of an iteration's update, in the order of computation."""


@dataclass(frozen=True)
class RecordedInputs:
    """Everything that an update depends on, besides weights and configuration."""

    step: int
    iterations: int  # total of the run, for learning rate schedules
    kl_coef: float  # coefficient of the KL penalty in the reward
    shares_prompts: bool
    max_tokens: int  # token budget of a micro-batch
    model: JsonObject  # resolved section of the policy's model
    machine: JsonObject  # result of describe_machine
    groups: list[TrajectoryGroup]
    policy_kl_coef: float | None = None  # as in Progress
    baseline: float | None = None  # as in Progress
    excluded_ids: tuple[int, ...] = ()  # token ids that the model never samples
    engine_dtype: str = ""


@dataclass(frozen=True)
class RecordedSteps:
    """Rows of the optimizer steps of an update."""

    mini_batches: list[list[int]]  # rows of each mini-batch
    trained_rows: list[bool] | None  # whether the policy was trained on each row; None: only the critic was trained
    sample: list[int] | None = None  # rows whose gradients are compared; None: all


@dataclass(frozen=True)
class Recording:
    """A complete recording, for `alphaapollo verify`."""

    folder: Path
    inputs: RecordedInputs
    outcome: Outcome
    steps: RecordedSteps
    config: JsonObject  # complete configuration of the run, by section

    def read_state(self, role: str) -> tuple[dict[str, Tensor], int]:
        """Return weights and optimizer state of a role before the update, by name, and its number of earlier steps."""
        folder = self.folder / role
        with explain_damage(folder):
            return read_all_tensors(folder / "model"), read_json(folder / "state.json").get("num_steps", 0)

    def read_gradients(self, role: str) -> list[Path]:
        """Return the files with the gradients of each optimizer step of an update."""
        folder = self.folder / OUTCOME / role
        return [folder / f"gradient_{step}.safetensors" for step in range(len([*folder.glob("gradient_[0-9]*")]))]

    def read_sample_gradients(self) -> dict[str, Tensor]:
        """Return the policy's gradients of the sample, before the first step."""
        return read_tensors(self.folder / OUTCOME / "policy" / "gradient_sample.safetensors")

    def read_weights(self, role: str, name: str = "weights") -> dict[str, Tensor]:
        """Return the weights after the update. name="weights_1": after the first of several steps."""
        return read_tensors(self.folder / OUTCOME / role / f"{name}.safetensors")

    def count_logged_steps(self) -> int | None:
        """Count the policy's optimizer steps before the iteration in the run's metrics; None if some are missing."""
        path, iterations = self.folder.parents[1] / "metrics.jsonl", range(1, self.inputs.step)
        with explain_damage(path):
            lines = {line["step"]: line for line in (read_metrics(path) if path.is_file() else ())}
            names = ("actor/optimizer_steps", "actor/steps_skipped")
            counts = [[lines[step].get(name) or 0.0 for name in names] for step in iterations if step in lines]
        return int(sum(steps - skipped for steps, skipped in counts)) if len(counts) == len(iterations) else None

    def read_published(self) -> JsonObject | None:
        """Return the probe's token ids and the engines' log-probs of it after the weight sync; None without engines."""
        path = self.folder / PUBLISHED
        with explain_damage(path):
            return dict(read_json(path)) if path.is_file() else None


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file. Raises a ValueError that names the file if it is damaged."""
    with explain_damage(path):
        return load_file(path)


def is_recording(folder: Path) -> bool:
    """Whether the folder is a recording, of this or an earlier format."""
    return (folder / INPUTS).is_file() or (folder / INPUTS).with_suffix(".pickle").is_file()


def write_outcome(recording: Path, outcome: Outcome, steps: RecordedSteps) -> None:
    """Add an update's result to its recording."""
    folder = recording / OUTCOME
    folder.mkdir(exist_ok=True)
    write_values(folder / VALUES, outcome)
    write_values(folder / STEPS, steps)
    write_manifest(folder)


def read_recording(folder: Path) -> tuple[RecordedInputs, Outcome]:
    """Read and verify a recorded iteration. The outcome is empty if the update did not end. Raises ValueError if the
    recording is missing or damaged, or has an unsupported format."""
    check_format(folder)
    if not is_recording(folder) or not (folder / MANIFEST).is_file():
        raise ValueError(
            f"{folder} is not a complete recording of an iteration. Use a folder <run>/recorded/step_N, which "
            "trainer.record_steps=[N] writes. Record an iteration again if the folder has a file groups.msgpack."
        )
    has_outcome = (folder / OUTCOME / MANIFEST).is_file()
    problems = find_damage(folder) + (find_damage(folder / OUTCOME) if has_outcome else [])
    if problems:
        raise ValueError(f"{folder} is damaged: {', '.join(problems)}. Use an intact copy, or a new recording.")
    outcome = read_values(folder / OUTCOME / VALUES, Outcome) if has_outcome else {}
    return read_values(folder / INPUTS, RecordedInputs), outcome


def read_complete_recording(folder: Path) -> Recording:
    """Read and verify a recording with its result. Raises ValueError if it is damaged, or the update did not end."""
    inputs, outcome = read_recording(folder)
    path = folder / OUTCOME / STEPS
    if not outcome or not (path.is_file() or path.with_suffix(".pickle").is_file()):
        raise ValueError(
            f"{folder} has no gradients: the run ended during the update, or an older alphaapollo recorded it. Record "
            "an iteration again with trainer.record_steps=[N]."
        )
    if not (steps := read_values(path, RecordedSteps)).mini_batches:
        raise ValueError(f"{folder}: the iteration was not trained on. Verify another one.")
    with explain_damage(folder / "config.yaml"):
        return Recording(folder, inputs, outcome, steps, read_yaml(folder / "config.yaml"))
