"""Runs of every earlier format resume, and their recordings are replayed (tests/old_runs)."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from alphaapollo.runs.checkpoint_folder import FORMAT
from alphaapollo.utils.plugins import is_available
from tests.loop.stack import STACK
from tests.old_runs.make import ARCHIVES, RUNS, unpack


@pytest.fixture(params=ARCHIVES, ids=lambda path: path.name)
def runs(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    with unpack(request.param, tmp_path) as folder:
        yield folder


def run(module: str, *words: object) -> str:
    output = Path("output.txt").absolute()
    code = STACK.run(module, words, output, dict(os.environ), Path.cwd())
    assert code == 0, output.read_text()
    return output.read_text()


def repeat_command(folder: Path, **changes: str) -> str:
    """Run the command of the run again, with other values of some keys."""
    _, _, module, *words = shlex.split(json.loads((folder / "history.jsonl").read_bytes().splitlines()[0])["command"])
    kept = [word for word in words if word.partition("=")[0] not in changes]
    return run(module, *kept, *(f"{key}={value}" for key, value in changes.items()))


def test_runs_resume_and_a_recording_is_replayed(runs: Path) -> None:
    recording = runs / "rl/recorded/step_000002"
    is_read = not (recording / "groups.msgpack").is_file()  # since format 2, recordings and pools have other files
    if is_read and is_available("commands", "replay"):
        run("alphaapollo.trainer.replay.__main__", recording)  # exit code 0: the results are equal
    for name in ("rl", "sft"):
        printed = repeat_command(runs / name, **{"trainer.total_training_steps": "3"})
        assert f"resumes from {runs / name}/checkpoints/step_000002" in " ".join(printed.split())
        steps = [json.loads(line)["step"] for line in (runs / name / "metrics.jsonl").read_text().splitlines()]
        assert steps[-3:] == [1, 2, 3]
        for folder in (runs / name, runs / name / "checkpoints/step_000003"):
            assert json.loads((folder / "format.json").read_text())["format"] == FORMAT
    assert "finished 2 prompts" in " ".join(repeat_command(runs / "generation").split())
    if is_read and is_available("commands", "evolve"):
        assert "2 candidates" in repeat_command(runs / "evolution")
    assert {path.name for path in runs.iterdir() if path.is_dir()} == {*RUNS}, "no run is moved aside"
