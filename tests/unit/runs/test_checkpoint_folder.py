from __future__ import annotations

import errno
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from alphaapollo.runs.checkpoint_folder import PROGRESS, CheckpointFolder, find_damage, read_progress
from alphaapollo.session.progress import Progress


def write(checkpoints: CheckpointFolder, step: int, validation: dict[str, float] | None = None) -> Path:
    folder = checkpoints.begin_checkpoint(step)
    (folder / "policy").mkdir()
    (folder / "policy/weights").write_text(str(step))
    Progress(step, prompts_consumed=10 * step, kl_coef=0.5, validation=validation or {}).write(folder)
    return checkpoints.complete_checkpoint(folder)


def test_only_complete_checkpoints_count(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path, keep=None)
    assert checkpoints.list_completed() == []
    for step in (1, 2):
        write(checkpoints, step)
    checkpoints.begin_checkpoint(3)  # killed while writing
    (tmp_path / "step_000004").touch()  # no folder
    found = checkpoints.list_completed()
    assert [folder.name for folder in found] == ["step_000001", "step_000002"]
    assert Progress.read(found[-1]) == Progress(2, 20, 0.5)
    for name in ("progress.json", "manifest.json"):  # a part of a checkpoint is a damaged one
        (found[0] / name).unlink()
    assert checkpoints.list_completed() == found
    (found[1] / "stale").touch()
    assert not (write(checkpoints, 2) / "stale").exists(), "writing a step again replaces it"


@pytest.mark.parametrize(
    ("metric", "values", "kept"),
    [
        ("val/accuracy", [0.5, 0.9, 0.8, 0.7, 0.6], [2, 4, 5]),
        ("val/accuracy", [0.5, 0.9, 0.9, 0.7, 0.6], [2, 4, 5]),  # of equal ones the oldest
        ("val/accuracy", [0.5, 0.6, 0.7, 0.8, 0.9], [4, 5]),
        ("val/accuracy", [0.9, None, math.nan, 0.7, None], [1, 4, 5]),
        ("val/loss_greedy", [0.5, 0.9, 0.8, 0.7, 0.6], [1, 4, 5]),
        ("val/loss/code", [0.5, 0.9, 0.3, 0.7, 0.6], [3, 4, 5]),
    ],
)
def test_the_best_checkpoint_is_kept_besides_the_newest(
    tmp_path: Path, metric: str, values: list[float | None], kept: list[int]
) -> None:
    for step, value in enumerate(values, start=1):  # a new object each time, as after a resume
        checkpoints = CheckpointFolder(tmp_path, 2, metric or None)
        write(checkpoints, step, {} if value is None else {metric: value, "val/reward": -step})
    assert checkpoints.list_completed() == [tmp_path / f"step_{step:06d}" for step in kept]


def test_unknown_keep_best_metric_is_refused_at_the_first_validation(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path, 2, "val/acc")
    checkpoints.check_keep_best_metric({"val/failed": 1.0})  # no sample has a score yet
    checkpoints.check_keep_best_metric({"val/accuracy": 0.5, "val/suite/gsm8k/failed": 1.0})
    with pytest.raises(ValueError, match=r"=val/acc .* val/accuracy, val/reward\."):
        checkpoints.check_keep_best_metric({"val/reward": 1.0, "val/accuracy": 0.5})
    checkpoints = CheckpointFolder(tmp_path, 2, "val/accuracy")
    checkpoints.check_keep_best_metric({"val/accuracy": 0.5})
    checkpoints.check_keep_best_metric({"val/reward": 0.0})


def test_copy_made_by_a_user_is_not_changed(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path, keep=1)
    copies = [shutil.copytree(write(checkpoints, 4), tmp_path / name) for name in ("step_000004_copy", "step_4")]
    write(checkpoints, 999_999)
    newest = write(checkpoints, 1_000_000)
    assert checkpoints.list_completed() == [newest]
    checkpoints.move_later_checkpoints_aside(step=2)
    assert all((copy / PROGRESS).exists() for copy in copies) and not newest.exists()


def test_a_kill_while_one_is_removed_leaves_no_part_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = CheckpointFolder(tmp_path, keep=1)
    write(checkpoints, 1)

    def killed(folder: Path, **options: Any) -> None:
        if folder.exists():
            (folder / "progress.json").unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", killed)
        write(checkpoints, 2)
    assert [path.name for path in checkpoints.list_completed()] == ["step_000002"]
    assert len(list(tmp_path.iterdir())) == 2
    checkpoints.remove_incomplete()
    assert [path.name for path in tmp_path.iterdir()] == ["step_000002"]


def test_checkpoint_is_synced_to_disk_before_its_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, right = [], os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).relative_to(tmp_path))
        right(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write(CheckpointFolder(tmp_path, keep=None), 1)
    names = ["format.json", "manifest.json", "policy", "policy/weights", "progress.json", "."]
    assert synced == [Path(".writing_step_000001") / name for name in names] + [Path(".")]


@pytest.mark.parametrize(
    ("files", "damage"),
    [
        ({}, []),
        ({"policy/weights": "0"}, ["policy/weights has changed"]),
        (
            {"policy/weights": "", "progress.json": None},
            ["policy/weights has 0 bytes of 1", "progress.json cannot be read (No such file or directory)"],
        ),
        *(({"manifest.json": text}, ["manifest.json cannot be read"]) for text in ('{"policy": 3', "[]", "", None)),
        ({"manifest.json": "{}"}, ["manifest.json is empty"]),
        ({"manifest.json": None, "progress.json": None}, ["manifest.json cannot be read"]),
    ],
)
def test_damage_is_named_file_by_file(tmp_path: Path, files: dict[str, str | None], damage: list[str]) -> None:
    checkpoint = write(CheckpointFolder(tmp_path, keep=None), 1)
    for name, text in files.items():
        (checkpoint / name).unlink()
        if text is not None:
            (checkpoint / name).write_text(text)
    messages = find_damage(checkpoint)
    assert len(messages) == len(damage) and all(map(str.startswith, messages, damage)), messages


def test_a_file_that_cannot_be_read_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = write(CheckpointFolder(tmp_path, keep=None), 1)
    right = os.open

    def broken_disk(path: Any, *args: Any, **options: Any) -> int:
        if Path(path).name == broken:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return right(path, *args, **options)

    monkeypatch.setattr(os, "open", broken_disk)
    broken = "weights"
    (damage,) = find_damage(checkpoint)
    assert damage.startswith("policy/weights ") and "(Input/output error)" in damage
    broken = "manifest.json"
    assert find_damage(checkpoint)[0].startswith("manifest.json cannot be read")


@pytest.mark.parametrize("text", ["", '{"step": 4', "7", '{"step": "4"}', "{}"])
def test_progress_that_is_no_more_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / PROGRESS).write_text(text)
    with pytest.raises(ValueError, match=r"progress\.json cannot be read "):
        read_progress(tmp_path)
