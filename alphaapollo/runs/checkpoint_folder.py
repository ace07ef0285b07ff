"""Write, list, verify and remove the checkpoints of a run. A checkpoint is complete or does not exist.

Run folders, checkpoints and recordings have one format number for all their files, in format.json. A folder without
this file has format 0, whose other files are those of format 1.

checkpoints/step_000020/   format.json  inputs.json  progress.json  manifest.json  policy/  critic/  (or model/)
checkpoints/.writing_step_000040/   checkpoint that is being written; it is renamed when it is complete
checkpoints/.removing_step_000010/  checkpoint that is being removed
checkpoints/aside_step_000040/      checkpoint that was moved aside when the run resumed from an earlier one
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import Self

import msgspec

from alphaapollo._version import __version__
from alphaapollo.config.metrics import is_lower_better
from alphaapollo.runs.input_digests import RunInputs
from alphaapollo.runs.run_status import STATUS
from alphaapollo.utils.disk import (
    explain_damage,
    explain_write_errors,
    open_regular,
    read_json,
    read_small_file,
    replace_file,
)
from alphaapollo.utils.heartbeat import HEARTBEAT
from alphaapollo.utils.json_types import JsonObject

FORMAT = 3  # formats 2 and 3 changed the files of rollout groups, in recordings and checkpoints with data.reuse
"""Increase it if older versions cannot read new folders, or newer versions cannot read old ones (CONTRIBUTING.md)."""
PROGRESS = "progress.json"
"""File with the driver's state in a checkpoint."""
INPUTS, FORMAT_FILE = "inputs.json", "format.json"
MANIFEST = "manifest.json"
"""File with size and digest of all other files of a checkpoint. A checkpoint without it counts as damaged."""
NAME = re.compile(r"step_(\d{6,})")  # name of a checkpoint; copies made by the user have other names
PARALLEL_READS = 4  # number of files that are read in parallel


def write_format(folder: Path) -> None:
    """Write format.json with FORMAT and the version of alphaapollo. Raises OSError if it cannot be written."""
    with explain_write_errors("the format", folder / FORMAT_FILE):
        replace_file(folder / FORMAT_FILE, [json.dumps({"format": FORMAT, "version": __version__}).encode() + b"\n"])


def check_format(folder: Path) -> None:
    """Raise ValueError if a newer version wrote the folder. Commands check each folder before they read the folder."""
    number, version = 0, ""
    with suppress(OSError, ValueError, TypeError, LookupError, OverflowError):  # find_damage reports damage
        written = read_json(folder / FORMAT_FILE)
        number, version = int(written["format"]), str(written["version"])
    if number > FORMAT:
        raise ValueError(
            f"{folder} has format {number}, but alphaapollo {__version__} reads formats up to {FORMAT}. Use alphaapollo"
            f" {version}, which wrote it, or a later version."
        )


def write_progress(folder: Path, fields: JsonObject) -> None:
    (folder / PROGRESS).write_text(json.dumps(fields, indent=1) + "\n")


def read_progress(folder: Path) -> JsonObject:
    """Read the driver's state in a checkpoint, progress.json. Raises ValueError if the file is damaged."""
    try:
        fields: JsonObject = read_json(folder / PROGRESS)
        if not isinstance(fields["step"], int):
            raise TypeError("its field 'step' is not an integer")
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise ValueError(f"{folder / PROGRESS} cannot be read ({error}). Resume from another checkpoint.") from None
    return fields


@dataclass
class RunProgress:
    """Base class of the driver's state in a checkpoint. `step`: number of complete iterations."""

    step: int = 0
    compared_metric: str | None = field(default=None, kw_only=True)  # early-stopping metric of the next fields
    best_value: float | None = field(default=None, kw_only=True)
    validations_without_improvement: int = field(default=0, kw_only=True)  # consecutive

    def write(self, folder: Path) -> None:
        write_progress(folder, asdict(self))

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read progress.json. Raises ValueError if it is damaged."""
        fields = read_progress(folder)
        with explain_damage(folder / PROGRESS):
            return cls(**fields)


class CheckpointFolder:
    """Folder with the checkpoints of one run.

    Args:
        keep: number of newest checkpoints to keep; None: keep all.
        keep_best: validation metric. The checkpoint with its best value is kept in addition to the newest ones.
        inputs: inputs of the run, written to each checkpoint.
    """

    def __init__(self, folder: Path, keep: int | None, keep_best: str | None = None, inputs: RunInputs | None = None):
        self.folder, self.keep, self.keep_best, self.inputs = folder, keep, keep_best, inputs
        self._is_metric_checked = False

    def begin_checkpoint(self, step: int, name: str = "") -> Path:
        """Create the folder `.writing_step_...` for the checkpoint of iteration `step`, with format.json and inputs.
        name: instead of step_...; such a checkpoint is never removed."""
        folder = self.folder / f".writing_{name or f'step_{step:06d}'}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write_format(folder)
        if self.inputs:
            (folder / INPUTS).write_bytes(msgspec.json.encode(self.inputs))
        return folder

    def remove_incomplete(self) -> None:
        """Remove folders that an interrupted save, or an interrupted deletion of a checkpoint, left behind."""
        for folder in [*self.folder.glob(".writing_*"), *self.folder.glob(".removing_*")]:
            shutil.rmtree(folder, ignore_errors=True)

    def complete_checkpoint(self, folder: Path) -> Path:
        """Write the manifest of the checkpoint in `folder`, sync it to disk and rename it. Remove old checkpoints."""
        write_manifest(folder)
        completed = self.folder / folder.name.removeprefix(".writing_")
        replaced = _prepare_removal(completed)  # it may exist after a resume from an older checkpoint
        folder.rename(completed)
        _sync_to_disk(self.folder)
        shutil.rmtree(replaced, ignore_errors=True)
        if self.keep is not None:
            best = self.find_best()
            for checkpoint in self.list_completed()[: -self.keep]:
                if checkpoint != best:
                    shutil.rmtree(_prepare_removal(checkpoint))
        return completed

    def find_best(self) -> Path | None:
        """Return the checkpoint with the best value of the metric `keep_best`, or None if no checkpoint was validated.
        Of several equally good checkpoints, return the oldest."""
        scores, sign = dict[Path, float](), -1 if is_lower_better(self.keep_best or "") else 1
        for path in self.list_completed():
            with suppress(ValueError):  # damaged
                value = read_progress(path).get("validation", {}).get(self.keep_best, math.nan)
                if math.isfinite(value):
                    scores[path] = sign * value
        return max(scores, key=lambda path: scores[path], default=None)

    def check_keep_best_metric(self, metrics: Mapping[str, float]) -> None:
        """Raise ValueError if `metrics`, those of the first validation, lack the metric named by `keep_best`."""
        if not self._is_metric_checked:
            check_metric_exists("trainer.keep_best", self.keep_best, metrics)
            self._is_metric_checked = self.keep_best in metrics

    def move_later_checkpoints_aside(self, step: int) -> None:
        """Rename the checkpoints of later iterations: `step_000040` becomes `aside_step_000040`."""
        for path in self.list_completed():
            if parse_step(path) > step:
                path.rename(_find_free_path(path.with_name(f"aside_{path.name}")))

    def list_completed(self) -> list[Path]:
        """Return the completed checkpoints, oldest first. Their files are not verified (see find_damage)."""
        paths = (path for path in self.folder.glob("step_*") if NAME.fullmatch(path.name) and path.is_dir())
        return sorted(paths, key=parse_step)


def check_metric_exists(key: str, metric: str | None, metrics: Mapping[str, float]) -> None:
    """Raise ValueError if `metrics` of a validation lack `metric`, the value of the configuration key `key`. Accept it
    if all samples of a data source or suite failed, because their metrics are then missing."""
    all_samples_failed = any(
        name.startswith(("val/failed", "val/suite")) and "/failed" in name and value == 1
        for name, value in metrics.items()
    )
    if metric is not None and metric not in metrics and not all_samples_failed:
        raise ValueError(
            f"{key}={metric} is not a metric of this run's validation. Set it to one of {', '.join(sorted(metrics))}."
        )


def list_checkpoints(path: Path) -> list[Path]:
    """Return the completed checkpoints of the run in `path`, oldest first, or `path` if it is a checkpoint itself."""
    is_checkpoint = (path / PROGRESS).is_file()
    checkpoints = [path] if is_checkpoint else CheckpointFolder(path / "checkpoints", keep=None).list_completed()
    for folder in [path, *checkpoints]:
        check_format(folder)
    return checkpoints


def parse_step(checkpoint: Path) -> int:
    """Return the iteration in the name of a checkpoint."""
    return int(checkpoint.name.removeprefix("step_"))


def write_manifest(folder: Path) -> None:
    """Write the size and SHA-256 of every file in the folder to manifest.json, and sync the folder to disk."""
    names = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    with ThreadPoolExecutor(PARALLEL_READS) as pool:
        written = dict(zip(names, pool.map(lambda name: _hash_file(folder / name), names), strict=True))
    (folder / MANIFEST).write_text(json.dumps(written, indent=1) + "\n")
    for file in [*sorted(folder.rglob("*")), folder]:
        _sync_to_disk(file)
        HEARTBEAT.tick()


def read_inputs(checkpoint: Path) -> RunInputs:
    """Read inputs.json of an undamaged checkpoint; without digests if an earlier version wrote the checkpoint."""
    file = checkpoint / INPUTS
    return msgspec.json.decode(read_small_file(file), type=RunInputs) if file.is_file() else RunInputs()


def find_damage(checkpoint: Path) -> list[str]:
    """Return a message for each file of a checkpoint that differs from its manifest."""
    try:
        manifest = read_json(checkpoint / MANIFEST)
        written = {str(name): (int(size), str(digest)) for name, (size, digest) in manifest.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return [f"{MANIFEST} cannot be read ({error})"]
    if not written:
        return [f"{MANIFEST} is empty"]

    def describe_file_damage(file_name: str) -> str:
        try:
            found_size, found_digest = _hash_file(checkpoint / file_name)
        except OSError as error:
            return f"{file_name} cannot be read ({error.strerror})"
        size, digest = written[file_name]
        if found_size != size:
            return f"{file_name} has {found_size} bytes of {size}"
        return "" if found_digest == digest else f"{file_name} has changed"

    with ThreadPoolExecutor(PARALLEL_READS) as pool:
        return [message for message in pool.map(describe_file_damage, written) if message]


def _hash_file(path: Path) -> tuple[int, str]:
    """Return (size in bytes, SHA-256) of a file."""
    with open_regular(path.resolve()) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        HEARTBEAT.tick()
        return file.tell(), digest


def _prepare_removal(folder: Path) -> Path:
    """Rename a checkpoint, if it exists, so that a kill leaves no incomplete one. Returns the folder to remove."""
    removing = folder.with_name(f".removing_{folder.name}")
    shutil.rmtree(removing, ignore_errors=True)
    if folder.exists():
        folder.rename(removing)
    return removing


def move_aside(folder: Path) -> Path | None:
    """Rename `<folder>` to `<folder>.1`, or `.2`, ... if that is taken. Returns the new path, if it exists."""
    if not folder.exists():
        return None
    moved = folder.rename(_find_free_path(folder))
    (moved / STATUS).unlink(missing_ok=True)  # status of the command that moves the folder
    return moved


def _find_free_path(path: Path) -> Path:
    """Return the first of `<path>`, `<path>.1`, `.2`, ... that does not exist."""
    paths = chain([path], (path.with_name(f"{path.name}.{number}") for number in count(1)))
    return next(free for free in paths if not free.exists())


def _sync_to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
