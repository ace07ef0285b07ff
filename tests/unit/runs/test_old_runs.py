"""Run folders of every earlier format can be viewed, reported, printed and exported (tests/old_runs)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from alphaapollo.cli.show import print_samples
from alphaapollo.evolving.pool import Pool
from alphaapollo.runs.run_model import find_newest_model, make_generation_config_values
from alphaapollo.trainer.main_export import main as export
from alphaapollo.trainer.replay.record import read_recording
from alphaapollo.viewer.index import RunIndex
from alphaapollo.viewer.report import make_report
from alphaapollo.viewer.run_folders import find_kind, read_run_state
from tests.old_runs.make import ARCHIVES, RUNS, unpack

KINDS = {"rl": "RL", "sft": "SFT", "generation": "evaluation", "evolution": "evolution"}


@pytest.fixture(params=ARCHIVES, ids=lambda path: path.name)
def runs(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    with unpack(request.param, tmp_path) as folder:
        yield folder


def test_the_viewer_reads_the_runs(runs: Path, tmp_path: Path) -> None:
    index = RunIndex(runs, tmp_path / "index.sqlite")
    with closing(index.connect()) as database:
        index.update(database)
        count = (
            "SELECT (SELECT count(*) FROM metrics), (SELECT count(*) FROM trajectories), (SELECT count(*) FROM pool)"
        )
        metrics, trajectories, records = database.execute(count).fetchone()
        assert database.execute("SELECT sum(damaged) FROM files").fetchone()[0] == 0
    assert metrics > 100 and trajectories == 8 + 4 + 4 and records == 4
    for name in RUNS:
        assert (find_kind(runs / name), read_run_state(runs / name).name) == (KINDS[name], "finished")
        report = make_report([runs / name]).decode()
        assert "damaged" not in report and "is missing" not in report


def test_samples_checkpoints_recordings_and_pools_are_read(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("rl", "generation"):
        assert print_samples([str(runs / name)]) == 0
    assert capsys.readouterr().out.count("sample 1") >= 4
    recording, pool = runs / "rl/recorded/step_000002", runs / "evolution"
    if (recording / "groups.msgpack").is_file():  # formats before 2
        with pytest.raises(ValueError, match="Only alphaapollo"):
            read_recording(recording)
        with pytest.raises(ValueError, match="use the version that wrote it"):
            Pool(pool)
    else:
        inputs, outcome = read_recording(recording)
        assert inputs.step == 2 and len(inputs.groups) == 2 and outcome is not None
        assert len(Pool(pool).candidates) == 2
    newest = find_newest_model(runs / "rl")  # what chat, serve and eval read
    assert newest.source is not None and make_generation_config_values(newest)["rollout"]["name"] == "fake"


def test_checkpoints_are_exported(runs: Path) -> None:
    for name in ("rl", "sft"):
        assert export([f"checkpoint={runs / name}"]) == 0
        assert "README.md" in {file.name for file in (runs / name / "exported/step_000002").iterdir()}
