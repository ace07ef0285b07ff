from __future__ import annotations

from pathlib import Path

import pytest

from alphaapollo.checkpoint_folder import CheckpointFolder
from alphaapollo.trainer.progress import Progress


def write(checkpoints: CheckpointFolder, step: int) -> Path:
    folder = checkpoints.begin(step)
    (folder / "policy").mkdir()
    (folder / "policy/weights").write_text(str(step))
    Progress(step, prompts_consumed=10 * step, kl_coef=0.5).write(folder)
    return checkpoints.finish(folder)


def test_newest_whole_checkpoint_is_found(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path, keep=None)
    assert checkpoints.find("auto", "") is None
    write(checkpoints, 1)
    write(checkpoints, 2)
    checkpoints.begin(3)  # killed while writing
    found = checkpoints.find("auto", "")
    assert found is not None and found.name == "step_000002"
    assert Progress.read(found) == Progress(2, 20, 0.5)
    assert checkpoints.find("disable", "") is None


def test_older_ones_are_removed(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path, keep=2)
    for step in (1, 2, 3):
        write(checkpoints, step)
    assert [folder.name for folder in checkpoints.whole()] == ["step_000002", "step_000003"]


def test_writing_a_step_again_replaces_it(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path, keep=None)
    (write(checkpoints, 1) / "stale").touch()
    assert not (write(checkpoints, 1) / "stale").exists()


def test_resume_path_that_is_no_checkpoint_lists_those_there_are(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path, keep=None)
    whole = write(checkpoints, 4)
    with pytest.raises(ValueError, match=r"no whole checkpoint.*step_000004"):
        checkpoints.find("resume_path", str(tmp_path / "elsewhere"))
    assert checkpoints.find("resume_path", str(whole)) == whole
