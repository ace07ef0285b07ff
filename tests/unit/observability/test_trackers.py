import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from alphaapollo.observability.trackers import JsonlTracker, TensorboardTracker, Tracker, check_trackers


def settings(*logger: str) -> dict:
    return {"trainer": {"logger": logger, "project_name": "project", "experiment_name": "experiment"}}


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def run(path: Path, resumed_step: int, *logged: int) -> None:
    tracker = JsonlTracker(path, resumed_step)
    for step in logged:
        tracker.log(step, {"critic/score/mean": step / 10})
    tracker.close()


def test_one_line_per_iteration_is_written_immediately(tmp_path: Path):
    path = tmp_path / "run" / "metrics.jsonl"
    tracker = JsonlTracker(path, 0)
    tracker.log(1, {"critic/score/mean": 0.5, "kl/mean": float("nan")})
    assert json.loads(path.read_text()) == {"step": 1, "critic/score/mean": 0.5, "kl/mean": None}
    tracker.close()


def test_damaged_lines_are_removed_and_reported(tmp_path: Path):
    path, notices = tmp_path / "metrics.jsonl", list[str]()
    run(path, 0, 0, 1, 2, 3, 4)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b'{"st\xffep": 1}\n', lines[2], b"[]\n", lines[4]]))
    JsonlTracker(path, 4, notices.append).close()
    assert steps(path) == [0, 2, 4] and notices == [f"{path}: lines 2, 4 cannot be parsed and were removed."]


def test_resume_drops_what_came_after_the_checkpoint(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    run(path, 0, 0, 1, 2, 3, 4)
    run(path, 2, 3)
    assert steps(path) == [0, 1, 2, 3]
    run(path, 3, 4)
    assert steps(path) == [0, 1, 2, 3, 4]


def test_a_new_run_starts_an_empty_file(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    run(path, 0, 0, 1)
    run(path, 0, 0)
    assert steps(path) == [0]


def test_incomplete_last_line_is_removed(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    run(path, 0, 1, 2)
    path.write_text(path.read_text() + '{"step": 3, "rew')
    run(path, 2, 3)
    assert steps(path) == [1, 2, 3]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_error_names_the_file(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    tracker = JsonlTracker.__new__(JsonlTracker)
    tracker._path, tracker._file = path, path.open("w")
    with pytest.raises(OSError, match=r"could not write the metrics: No space left on device\. Free disk"):
        tracker.log(1, {"critic/score/mean": 0.5})


def test_missing_package_is_an_error_before_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"trainer\.logger has wandb, .*install -e '\.\[wandb\]' in the clone, or remove wandb"
    ):
        Tracker(settings("console", "wandb"), tmp_path, 0)
    assert list(tmp_path.iterdir()) == []
    check_trackers(["console"])


def test_missing_login_is_an_error_before_the_start(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.delenv("WANDB_MODE", raising=False)
    for logged_in in (True, False):
        monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(login=lambda answer=logged_in, **_: answer))
        if logged_in:
            check_trackers(["wandb"])
        else:
            with pytest.raises(ValueError, match=r"wandb, but you are not logged in\. Log in with `wandb login`"):
                check_trackers(["wandb"])
    monkeypatch.setenv("WANDB_MODE", "offline")
    check_trackers(["wandb"])


def test_tensorboard_drops_steps_after_the_checkpoint(tmp_path: Path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resumed, logged in ((0, (1, 2, 3)), (2, (3,))):
        tracker = TensorboardTracker(tmp_path, resumed)
        for step in logged:
            tracker.log(step, {"critic/score/mean": step + resumed / 10})
        tracker.close()
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("critic/score/mean")
    assert [(event.step, round(event.value, 3)) for event in events] == [(1, 1.0), (2, 2.0), (3, 3.2)]


@pytest.mark.timeout(120)
def test_wandb_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    tracker = Tracker(settings("wandb"), tmp_path, 0)
    tracker.log(1, {"critic/score/mean": 0.5})
    tracker.close()
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert steps(tmp_path / "metrics.jsonl") == [1]
