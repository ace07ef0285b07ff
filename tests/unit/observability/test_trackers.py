import json
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from alphaapollo.observability import trackers
from alphaapollo.observability.trackers import JsonlTracker, Tracker, TrackerPackage, check_trackers
from alphaapollo.types import Outcome, Prompt, Score, TrajectoryGroup
from tests.builders import make_group, make_trajectory, make_turn

SCORE = "critic/score/mean"
FOUR_SCORES = [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]
FIRST_TEXT = "answer 0 <b>\n| é ?"  # of `groups`, without the lone surrogate


def settings(*logger: str) -> dict:
    return {"trainer": {"logger": logger, "project_name": "project", "experiment_name": "experiment"}}


def groups(count: int = 3) -> list[TrajectoryGroup]:
    """Prompts with one answer each; the second has no ground truth, and the grader of the third failed."""
    scores = [Score(1.0), Score(0.0), Score(math.nan, outcome=Outcome.GRADER_FAILED)]
    made = []
    for number in range(count):
        chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"{number} + 7 = ?"}]
        turn = make_turn([7], text=f"answer {number} <b>\n| é \ud800")
        prompt = Prompt(number, "math", chat, None if number == 1 else "14")
        made.append(make_group(make_trajectory(turn, score=scores[number % 3], prompt_id=number), prompt=prompt))
    return made


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def run(path: Path, resumed_step: int, *logged: int) -> list[str]:
    """Log iterations to a metrics.jsonl. Returns the notices."""
    notices = list[str]()
    tracker = JsonlTracker(path, resumed_step, notices.append)
    for step in logged:
        tracker.log(step, {SCORE: step / 10, "kl/mean": math.nan})
        last = path.read_bytes().splitlines()[-1]
        assert json.loads(last) == {"step": step, SCORE: step / 10, "kl/mean": None}, "it is written immediately"
    tracker.close()
    return notices


def test_a_resume_drops_what_came_after_the_checkpoint_and_a_new_run_everything(tmp_path: Path):
    path = tmp_path / "run/metrics.jsonl"
    run(path, 0, 0, 1, 2, 3, 4)
    assert run(path, 2, 3) == [] and steps(path) == [0, 1, 2, 3]
    path.write_text(path.read_text() + '{"step": 4, "rew')  # an incomplete line
    assert run(path, 3, 4) == [] and steps(path) == [0, 1, 2, 3, 4]
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b'{"st\xffep": 1}\n', lines[2], b"[]\n", lines[4]]))
    (notice,) = run(path, 4)
    assert steps(path) == [0, 2, 4] and notice.startswith(f"{path}: lines 2, 4 ")
    assert run(path, 0, 0) == [] and steps(path) == [0]
    assert [file.name for file in path.parent.iterdir()] == ["metrics.jsonl"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_error_names_the_file(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    tracker = JsonlTracker.__new__(JsonlTracker)
    tracker._path, tracker._file = path, path.open("w")
    with pytest.raises(OSError, match="metrics: No space left on device"):
        tracker.log(1, {"critic/score/mean": 0.5})


def test_a_missing_tracker_is_an_error_before_the_start(tmp_path: Path):
    with pytest.raises(ValueError, match="no installed package has this tracker"):
        Tracker(settings("console", "gone"), tmp_path, 0)
    assert list(tmp_path.iterdir()) == []
    check_trackers(["console"])


class RecordingBackend:
    """Backend that keeps what it gets, and calls `act` before."""

    def __init__(self, act: Callable[[str, int], None]):
        self.calls: list[tuple[str, int]] = []
        self.act = act
        self._call("start", 0)

    def _call(self, name: str, step: int) -> None:
        self.act(name, step)
        self.calls.append((name, step))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._call("log", step)

    def log_samples(self, step: int, name: str, samples: Any) -> None:
        self._call(f"{name} {len(samples)}", step)

    def close(self) -> None:
        self._call("close", 3)


def use_backends(monkeypatch: pytest.MonkeyPatch, **acts: Callable[[str, int], None]) -> dict[str, RecordingBackend]:
    """Register backends of fake packages. Returns the dict in which they appear once they are created."""
    made, packages = dict[str, RecordingBackend](), dict[str, TrackerPackage]()
    for name, act in acts.items():
        package = TrackerPackage(lambda run, name=name, act=act: made.setdefault(name, RecordingBackend(act)), list)
        packages[name] = package
    monkeypatch.setattr(trackers, "load_plugin", lambda group, name: packages.get(name))
    return made


def log_three_iterations(folder: Path, *names: str) -> list[str]:
    notices = list[str]()
    tracker = Tracker(settings("console", *names), folder, 0, notices.append)
    for step in (1, 2, 3):
        tracker.log(step, {SCORE: step / 10})
        tracker.log_samples(step, groups(), "_greedy")
    tracker.close()
    assert steps(folder / "metrics.jsonl") == [1, 2, 3]
    return notices


ALL_CALLS = [call for step in (1, 2, 3) for call in (("log", step), ("val/samples_greedy 3", step))]


@pytest.mark.parametrize(("failing", "step"), [("start", 0), ("log", 2), ("val/samples_greedy 3", 2), ("close", 3)])
def test_a_tracker_that_raises_does_not_stop_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, failing: str, step: int
):
    def act(name: str, at: int) -> None:
        if (name, at) == (failing, step):
            raise ConnectionError("no route to https://me:abc@server")

    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:abc@server")
    made = use_backends(monkeypatch, broken=act, working=lambda name, at: None)
    (notice,) = log_three_iterations(tmp_path, "broken", "working")
    assert "broken" in notice and "ConnectionError: no route to https://$MLFLOW_TRACKING_URI@server" in notice
    assert f"step {step} " in notice and str(tmp_path) in notice
    assert made["working"].calls == [("start", 0), *ALL_CALLS, ("close", 3)]
    assert "broken" not in made or made["broken"].calls == [("start", 0), *ALL_CALLS][: len(made["broken"].calls)]


@pytest.mark.parametrize(("blocking", "step"), [("start", 0), ("log", 2), ("close", 3)])
def test_a_tracker_that_blocks_does_not_delay_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, blocking: str, step: int
):
    blocked, release = threading.Event(), threading.Event()

    def act(name: str, at: int) -> None:
        if (name, at) == (blocking, step):
            blocked.set()
            release.wait(120)

    def has_waited(thread: trackers.BackgroundTracker, deadline: float) -> None:
        assert blocked.wait(60)
        wait(thread, 0.0)

    wait = trackers.BackgroundTracker.wait
    monkeypatch.setattr(trackers.BackgroundTracker, "wait", has_waited)  # the deadline passes when the tracker blocks
    use_backends(monkeypatch, slow=act)
    (notice,) = log_three_iterations(tmp_path, "slow")  # returns while the tracker is still blocked
    assert not release.is_set()
    assert "tracker slow" in notice and "30 s" in notice and f"step {step} " in notice
    release.set()


def test_samples_are_the_first_ones_without_secrets(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TOOL_TOKEN", "secret-of-the-tool")
    first, *others = groups(40)
    first.trajectories[0].turns[0].text = "the key is secret-of-the-tool"
    table = trackers.make_sample_table(5, [first, *others])
    assert len(table) == 32 and set(table["step"]) == {5}
    first_row = ["Be brief.\n\n0 + 7 = ?", "the key is $TOOL_TOKEN", "14", 1.0]
    assert table.loc[0, ["prompt", "text", "ground_truth", "reward"]].tolist() == first_row
    assert table.loc[1, ["text", "ground_truth", "reward"]].tolist() == ["answer 1 <b>\n| é ?", "", 0.0]
    assert math.isnan(table.loc[2, "reward"]) and table.loc[2, "outcome"] == "grader_failed"
