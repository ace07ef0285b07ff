"""The viewer and the report read runs of earlier versions, and name runs of later ones."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest
import yaml

from alphaapollo.config import renamed_keys
from alphaapollo.config.load import save_config
from alphaapollo.config.schema import Config, GenerationConfig
from alphaapollo.plugins.viewer.index import RunIndex
from alphaapollo.plugins.viewer.print_samples import find_samples_file, print_samples
from alphaapollo.plugins.viewer.report import make_report
from alphaapollo.plugins.viewer.run_folders import find_kind, read_config, read_run_state
from alphaapollo.runs.checkpoint_folder import FORMAT
from tests.old_runs.make import ARCHIVES, RUNS, unpack

KINDS = {"rl": "RL", "sft": "SFT", "generation": "evaluation", "evolution": "evolution"}


@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda path: path.name)
def test_the_viewer_reads_the_runs(archive: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with unpack(archive, tmp_path) as runs:
        index = RunIndex(runs, tmp_path / "index.sqlite")
        with closing(index.connect()) as database:
            index.update(database)
            counts = (f"SELECT count(*) FROM {table}" for table in ("metrics", "trajectories", "pool"))
            metrics, trajectories, records = (database.execute(count).fetchone()[0] for count in counts)
            assert database.execute("SELECT sum(damaged) FROM files").fetchone()[0] == 0
        assert metrics > 100 and trajectories == 8 + 4 + 4 and records == 4
        for name in RUNS:
            assert (find_kind(runs / name), read_run_state(runs / name).name) == (KINDS[name], "finished")
            report = make_report([runs / name]).decode()
            assert "damaged" not in report and "is missing" not in report
        for name in ("rl", "generation"):
            assert print_samples([str(runs / name)]) == 0
        assert capsys.readouterr().out.count("sample 1") >= 4


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    save_config(GenerationConfig(), tmp_path / "config.yaml")
    (tmp_path / "format.json").write_text(json.dumps({"format": FORMAT + 1, "version": "9.8.7"}))
    with pytest.raises(ValueError, match=rf"{tmp_path} has format {FORMAT + 1}, .* 9\.8\.7"):
        make_report([tmp_path])
    with pytest.raises(ValueError, match=rf"{tmp_path} has format {FORMAT + 1}"):
        find_samples_file(tmp_path, None, False)
    assert read_run_state(tmp_path).name == "unreadable" and "9.8.7" in read_run_state(tmp_path).reason


def test_configurations_are_read_under_the_new_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renamed_keys, "RENAMED_KEYS", {"trainer.random": "trainer.seed"})
    save_config(Config(), tmp_path / "config.yaml")
    values = yaml.safe_load((tmp_path / "config.yaml").read_text())
    values["trainer"]["random"] = values["trainer"].pop("seed") + 3
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    assert read_config(tmp_path)["trainer"]["seed"] == 3
