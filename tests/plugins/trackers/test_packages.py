"""The trackers of trainer.logger, with their real packages."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from alphaapollo.observability.trackers import Tracker, check_trackers
from tests.processes import wait_until
from tests.unit.observability.test_trackers import FIRST_TEXT, FOUR_SCORES, SCORE, groups, settings, steps


def track(name: str, folder: Path, resumed_step: int, logged: Sequence[int]) -> list[str]:
    """Log iterations and, at each even one, samples. Returns the notices."""
    notices = list[str]()
    tracker = Tracker(settings("console", name), folder, resumed_step, notices.append)
    for step in logged:
        if step % 2 == 0:
            tracker.log_samples(step, groups(), "")
        tracker.log(step, {SCORE: step / 10, "val/pass@4": 0.5, "kl/mean": math.nan})
    tracker.close()
    return notices


def test_missing_package_is_an_error_before_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "swanlab", None)
    with pytest.raises(ValueError, match=r"swanlab.*'\.\[swanlab\]'"):
        Tracker(settings("console", "swanlab"), tmp_path, 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["wandb", "swanlab"])
def test_missing_login_is_an_error_before_the_start(monkeypatch: pytest.MonkeyPatch, name: str):
    def log_in(key: str | None) -> None:
        settings = SimpleNamespace(api_key=key)
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(login=lambda **_: key, Settings=lambda: settings))

    monkeypatch.delenv(f"{name.upper()}_MODE", raising=False)
    log_in("key")
    check_trackers([name])
    log_in(None)
    with pytest.raises(ValueError, match=f"{name} login.*=offline"):
        check_trackers([name])
    monkeypatch.setenv(f"{name.upper()}_MODE", "offline")
    check_trackers([name])


def test_tensorboard_drops_steps_after_the_checkpoint(tmp_path: Path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert track("tensorboard", tmp_path, 0, (1, 2, 3)) == track("tensorboard", tmp_path, 2, (3, 4)) == []
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, round(event.value, 3)) for event in events.Scalars(SCORE)] == FOUR_SCORES
    tables = [event.tensor_proto.string_val[0].decode() for event in events.Tensors("val/samples/text_summary")]
    assert ["<td>4</td>" in table and "answer 2 &lt;b&gt;" in table for table in tables] == [False, True]


def test_wandb_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    assert track("wandb", tmp_path, 0, (1, 2)) == []
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/val/samples_*.table.json")
    first_row = [2, "Be brief.\n\n0 + 7 = ?", FIRST_TEXT, "14", 1.0, "scored"]
    assert json.loads(table.read_text())["data"][0] == first_row
    assert steps(tmp_path / "metrics.jsonl") == [1, 2]
    # Its process has ended, which wandb would otherwise use at the end of the program. A restarted run starts another.
    assert wait_until(lambda: "wandb-core" not in [child.name() for child in psutil.Process().children(recursive=True)])
    assert track("wandb", tmp_path, 1, (2,)) == []
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == 2


def test_mlflow_continues_a_resumed_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    assert track("mlflow", tmp_path, 0, (1, 2)) == track("mlflow", tmp_path, 2, (3, 4)) == []
    (run,) = mlflow.search_runs(experiment_names=["project"], output_format="list")
    assert (run.info.run_name, run.info.status) == ("experiment", "FINISHED")
    assert run.data.params["trainer.project_name"] == "project" and run.data.metrics["val/pass_4"] == 0.5
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, SCORE)
    assert [(point.step, point.value) for point in history] == FOUR_SCORES
    mlflow.set_experiment("project")
    table = mlflow.load_table("val/samples.json", run_ids=[run.info.run_id])
    assert table["step"].tolist() == [2, 2, 2, 4, 4, 4] and table.loc[0, "text"] == FIRST_TEXT


def test_trackio_continues_a_resumed_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when the package is imported
    storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    assert track("trackio", tmp_path, 0, (1, 2)) == track("trackio", tmp_path, 2, (3, 4)) == []
    assert [record["name"] for record in storage.get_run_records("project")] == ["experiment"]
    logs = storage.get_logs("project", "experiment")
    assert [(line["step"], line[SCORE]) for line in logs if SCORE in line] == FOUR_SCORES
    tables = [(line["step"], line["val/samples"]["_value"]) for line in logs if "val/samples" in line]
    assert [(step, rows[0]["text"], len(rows)) for step, rows in tables] == [(2, FIRST_TEXT, 3), (4, FIRST_TEXT, 3)]


def test_swanlab_continues_a_resumed_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    pytest.importorskip("swanlab")
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    monkeypatch.setenv("SWANLAB_MODE", "offline")
    assert track("swanlab", tmp_path, 0, (1, 2)) == track("swanlab", tmp_path, 2, (3, 4)) == []
    starts, scalars, tables = list[tuple[str, str, str]](), list[tuple[int, float]](), list[int]()
    for path in sorted(tmp_path.glob("swanlog/run-*/*.swanlab")):
        reader = DataStoreReader()
        reader.open(path)
        for record in map(Record.FromString, reader):
            if record.HasField("start"):
                starts.append((record.start.project, record.start.name, record.start.id))
            if record.scalar.key == SCORE:
                scalars.append((record.scalar.step, record.scalar.value.number))
            if record.media.key == "val/samples":
                tables.append(record.media.step)
    assert len(starts) == 2 and starts[0] == starts[1] and starts[0][:2] == ("project", "experiment")
    assert scalars == FOUR_SCORES and tables == [2, 4]
    (table,) = tmp_path.glob("swanlog/run-*/media/echarts/002-*.json")
    assert json.loads(table.read_text())["rowData"][0]["text"] == FIRST_TEXT
