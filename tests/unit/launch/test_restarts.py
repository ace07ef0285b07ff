"""Automatic restarts: when, and from which checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from alphaapollo.config.schema import Config
from alphaapollo.controller.errors import RunStalled, WorkerDied, WorkerFailed, WorkerLost
from alphaapollo.launch.command import clean_up_processes, run_with_restarts
from alphaapollo.observability.console import Console
from alphaapollo.processes.watchdog import RUN, list_run_processes, new_run_id
from alphaapollo.runs.checkpoint_folder import CheckpointFolder
from alphaapollo.runs.resume import find_start_point
from alphaapollo.runs.run_plan import RunPlan
from alphaapollo.session.progress import Progress
from alphaapollo.trainer.setup.preparation import RlPreparation

DIED = WorkerDied("the policy worker of rank 0 (pid 7) died: killed", "policy")


def config_of(folder: Path, **trainer: Any) -> Config:
    names = {"output_dir": str(folder), "project_name": "p", "experiment_name": "run", "controller": "local"}
    return Config.model_validate({"trainer": names | trainer})


class FakeRun:
    """A run that saves every second iteration. Each attempt ends with a death, or at the last iteration.

    attempts: iteration and error of each attempt; None: no error.
    """

    def __init__(self, config: Config, *attempts: tuple[int, Exception] | None):
        self.attempts, self.began, self.configs = list(attempts), list[str](), list[Config]()
        self.prepared = RlPreparation(config, Console())
        self.prepared.start = find_start_point(config)

    def go(self) -> None:
        run_with_restarts(self.prepared, self.run, Console())

    async def run(self, prepared: RlPreparation, progress: Progress) -> None:
        self.configs.append(prepared.config)
        start = prepared.start
        self.began.append(start.checkpoint.name if start.checkpoint else "scratch")
        start.prepare_folder(prepared.config, RunPlan({}))
        metrics = prepared.config.trainer.folder / "metrics.jsonl"
        metrics.touch()
        death = self.attempts.pop(0)
        while progress.step < (8 if death is None else death[0] - 1):
            progress.step += 1
            metrics.write_text(metrics.read_text() + "{}\n")
            if progress.step % 2 == 0:
                checkpoints = CheckpointFolder(prepared.config.trainer.folder / "checkpoints", None)
                folder = checkpoints.begin_checkpoint(progress.step)
                progress.write(folder)
                checkpoints.complete_checkpoint(folder)
        if death:
            raise death[1]


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., FakeRun]:
    def make_run(*attempts: tuple[int, Exception] | None, **trainer: Any) -> FakeRun:
        return FakeRun(config_of(tmp_path, **trainer), *attempts)

    return make_run


def test_a_death_is_reported(make_run: Callable[..., FakeRun], capsys: pytest.CaptureFixture[str]) -> None:
    make_run((4, DIED), (7, DIED), None).go()
    printed = " ".join(capsys.readouterr().out.split())
    assert all(f"{DIED}; restart {number} of at most 3 " in printed for number in (1, 2))


STALLED = RunStalled("the policy worker of rank 1 is stopped", ["policy 1"], "stopped; run the command again")
ENGINE = WorkerDied("the rollout worker of rank 0 died", "rollout")
GIVEN = {"resume_mode": "resume_path", "resume_from_path": "p/run/checkpoints/step_000002"}


@pytest.mark.parametrize(
    ("earlier", "attempts", "trainer", "began"),
    [
        (None, [(4, DIED), (7, DIED), None], {}, ["scratch", "step_000002", "step_000006"]),
        (None, [(2, DIED), None], {}, ["scratch", "scratch"]),  # before the first checkpoint
        (None, [(4, STALLED), None], {}, ["scratch", "step_000002"]),
        # Newer checkpoints of an earlier run of this name, to step 8, are not used: its own are.
        (8, [(4, DIED), (4, ENGINE), None], {"resume_mode": "disable"}, ["scratch", "step_000002", "step_000002"]),
        (8, [(4, DIED), (6, DIED), None], GIVEN, ["step_000002", "step_000002", "step_000004"]),
    ],
)
def test_a_run_resumes_from_its_newest_checkpoint(
    make_run: Callable[..., FakeRun],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    earlier: int | None,
    attempts: list[tuple[int, Exception] | None],
    trainer: dict[str, str],
    began: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if earlier:
        make_run(None).go()
    run = make_run(*attempts, **trainer)
    run.go()
    assert run.began == began
    if began[-1] == "scratch":
        assert (tmp_path / "p/run.1/metrics.jsonl").read_text() == "{}\n"
    if trainer.get("resume_mode") == "disable":
        assert (tmp_path / "p/run.1/checkpoints/step_000008").is_dir()


def test_the_number_of_restarts_is_limited(make_run: Callable[..., FakeRun]) -> None:
    run = make_run((3, DIED), (4, DIED), max_restarts=1)
    with pytest.raises(WorkerLost, match=r"killed; .*max_restarts=1 .*step_000002"):
        run.go()
    with pytest.raises(WorkerLost, match="max_restarts=0 allows no further"):
        make_run((3, DIED), max_restarts=0).go()


def test_a_role_that_dies_twice_in_an_iteration_is_not_restarted(make_run: Callable[..., FakeRun]) -> None:
    run = make_run((3, DIED), (3, ENGINE), (4, ENGINE), (3, ENGINE), (3, ENGINE), max_restarts=9)
    with pytest.raises(WorkerLost, match="also in iteration 3"):
        run.go()
    assert len(run.began) == 5  # another role or iteration is restarted
    with pytest.raises(WorkerLost, match="also in iteration 1"):
        make_run((1, DIED), (1, DIED), max_restarts=9, experiment_name="other").go()


def test_other_errors_end_the_run(make_run: Callable[..., FakeRun]) -> None:
    for error in (ValueError("a key"), WorkerFailed("a bug"), OSError("no space is left"), FloatingPointError("nan")):
        run = make_run((3, error), resume_mode="disable")
        with pytest.raises(type(error), match=str(error)):
            run.go()


def test_damaged_checkpoints_are_skipped(
    make_run: Callable[..., FakeRun], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = {"step_000004"}
    monkeypatch.setattr("alphaapollo.runs.resume.find_damage", lambda path: ["x has changed"] * (path.name in damaged))
    run = make_run((5, DIED), None)
    run.go()
    assert run.began == ["scratch", "step_000002"]
    damaged.add("step_000002")
    with pytest.raises(ValueError, match="x has changed"):
        make_run((5, DIED), experiment_name="other").go()
    assert str(DIED) in " ".join(capsys.readouterr().out.split()), "both reasons are reported"


def test_processes_and_environment_of_a_dead_run_are_cleaned_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(RUN, raising=False)  # of an earlier test in this process
    before, left = dict(os.environ), []

    def start() -> None:
        with clean_up_processes():
            left.append(new_run_id())
            os.environ["A_LIBRARYS_OWN"] = "1"
            left.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
            while not list_run_processes(left[0]):  # until the child has started its program
                pass
            raise DIED

    with pytest.raises(WorkerDied):
        start()
    run_id, orphan = left
    assert orphan.wait() == -9 and list_run_processes(run_id) == []
    assert dict(os.environ) == before and RUN not in before
