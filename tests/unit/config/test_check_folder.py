from __future__ import annotations

import os
from pathlib import Path

import pytest

from alphaapollo.config.check_folder import check_folder
from alphaapollo.config.schema import RunFolder


def problems(folder: Path, **keys: str) -> list[str]:
    return list(check_folder(RunFolder(**{"output_dir": str(folder)} | keys)))


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"experiment_name": ""}, "trainer.experiment_name='': without it the run would be the folder above"),
        ({"experiment_name": "."}, "without it"),
        ({"project_name": ""}, "trainer.project_name=''"),
        ({"experiment_name": "../../escape"}, "leaves trainer.output_dir"),
        ({"experiment_name": "/tmp/run"}, "leaves trainer.output_dir"),
        ({"experiment_name": "grpo/lr1"}, "trainer.experiment_name='grpo/lr1': a run inside another's folder"),
        ({"project_name": "p/grpo"}, "Give a name without /"),
        ({"experiment_name": "x" * 300}, "xxxxxxxxxxxxxxxxxxxx... has 300 bytes. Give a name of 200 or less"),
        ({"experiment_name": "a\0b"}, "zero byte"),
        ({"output_dir": "y" * 300}, "trainer.output_dir: yyyy"),
    ],
)
def test_names_that_cannot_be(tmp_path: Path, keys: dict[str, str], says: str) -> None:
    (problem,) = problems(tmp_path, **keys)
    assert says in problem


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (problem,) = problems(tmp_path / "file")
    assert f"{tmp_path / 'file'} is a file" in problem
    (problem,) = problems(tmp_path, project_name="file")
    assert "is a file" in problem


def test_a_folder_without_the_right_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    (problem,) = problems(tmp_path / "not" / "there")
    assert f"you cannot write in {tmp_path}." in problem


def test_what_can_be(tmp_path: Path) -> None:
    assert problems(tmp_path, experiment_name="a") == problems(tmp_path / "new" / "er") == []
