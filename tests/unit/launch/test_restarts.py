"""When a run goes on by itself after a death, from where, and when it does not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from alphaapollo.config.schema import Config
from alphaapollo.controller.ranks import Stalled, WorkerDied, WorkerFailed
from alphaapollo.launch.checkpoint_folder import CheckpointFolder
from alphaapollo.launch.failures import NotRestarted
from alphaapollo.launch.restarts import Restarts, nothing_left, run_with_restarts
from alphaapollo.launch.resume import find_start
from alphaapollo.trainer.lifecycle import Prepared
from alphaapollo.trainer.progress import Progress
from alphaapollo.trainer.setup.resume_rule import change_rule_of
from alphaapollo.utils.watchdog import RUN, name_run, processes_of_run

DIED = WorkerDied("the policy worker of rank 0 (pid 7) died: killed", "policy")


def config_of(folder: Path, **trainer: Any) -> Config:
    names = {"output_dir": str(folder), "project_name": "p", "experiment_name": "run", "controller": "local"}
    return Config.model_validate({"trainer": names | trainer})


class Story:
    """What a run meets: each attempt finishes iterations, saving every second one, until somebody dies, or to its end.

    attempts: the iteration in which each one dies, and how; None: it does not.
    """

    def __init__(self, config: Config, *attempts: tuple[int, Exception] | None):
        self.attempts, self.began, self.configs = list(attempts), list[str](), list[Config]()
        plan: Any = SimpleNamespace(folder=config.trainer.folder)
        self.prepared = Prepared(config, plan, SimpleNamespace(), find_start(config, change_rule_of(config)))  # type: ignore[arg-type]

    def go(self) -> None:
        run_with_restarts(self.prepared, self.run)

    async def run(self, prepared: Prepared, progress: Progress) -> None:
        self.configs.append(prepared.config)
        start = prepared.start
        self.began.append(start.checkpoint.name if start.checkpoint else "anew")
        start.claim(prepared.config)
        metrics = prepared.plan.folder / "metrics.jsonl"
        metrics.touch()
        death = self.attempts.pop(0)
        while progress.step < (8 if death is None else death[0] - 1):
            progress.step += 1
            metrics.write_text(metrics.read_text() + "{}\n")
            if progress.step % 2 == 0:
                checkpoints = CheckpointFolder(prepared.plan.folder / "checkpoints", None)
                folder = checkpoints.begin(progress.step)
                progress.write(folder)
                checkpoints.finish(folder)
        if death:
            raise death[1]


@pytest.fixture
def tell(tmp_path: Path) -> Callable[..., Story]:
    def tell(*attempts: tuple[int, Exception] | None, **trainer: Any) -> Story:
        return Story(config_of(tmp_path, **trainer), *attempts)

    return tell


def test_a_death_is_told_and_the_run_goes_on_from_its_newest_checkpoint(
    tell: Callable[..., Story], capsys: pytest.CaptureFixture[str]
) -> None:
    story = tell((4, DIED), (7, DIED), None)
    story.go()
    assert story.began == ["anew", "step_000002", "step_000006"]
    printed = " ".join(capsys.readouterr().out.split())
    assert f"{DIED}; restart 1 of at most 3 (trainer.max_restarts) goes on from " in printed
    assert f"{DIED}; restart 2 of at most 3" in printed


def test_before_the_first_checkpoint_it_begins_anew_beside_what_was(tell: Callable[..., Story]) -> None:
    story = tell((2, DIED), None)
    story.go()
    assert story.began == ["anew", "anew"]
    assert (story.prepared.plan.folder.with_name("run.1") / "metrics.jsonl").read_text() == "{}\n"


def test_all_restarts_are_used_up(tell: Callable[..., Story]) -> None:
    story = tell((3, DIED), (4, DIED), max_restarts=1)
    with pytest.raises(NotRestarted, match=r"died: killed; trainer.max_restarts=1 allows no further restart: stopped;.*"
                       r"the same command goes on from .*step_000002"):  # fmt: skip
        story.go()
    with pytest.raises(NotRestarted, match="max_restarts=0 allows no further"):
        tell((3, DIED), max_restarts=0).go()


def test_what_dies_twice_at_one_place_is_not_tried_again() -> None:
    tries = Restarts(9)
    assert tries.refused(33, "policy") == ""
    assert tries.refused(33, "rollout") == ""  # another one
    assert tries.refused(34, "rollout") == ""  # further on
    assert tries.refused(33, "rollout") == "" and tries.made == 4
    assert "iteration 33 as the time before" in tries.refused(33, "rollout")


def test_a_start_that_dies_again_and_again_ends(tell: Callable[..., Story]) -> None:
    story = tell((1, DIED), (1, DIED), max_restarts=9)
    with pytest.raises(NotRestarted, match="iteration 1 as the time before"):
        story.go()


def test_what_is_no_death_ends_the_run(tell: Callable[..., Story]) -> None:
    for error in (ValueError("a key"), WorkerFailed("a bug"), OSError("no space is left"), FloatingPointError("nan")):
        story = tell((3, error), resume_mode="disable")
        with pytest.raises(type(error), match=str(error)):
            story.go()


def test_who_stands_still_is_named_by_his_role(tell: Callable[..., Story]) -> None:
    stalled = Stalled("the policy worker of rank 1 is stopped", ["policy 1"], "stopped; the same command goes on")
    assert stalled.who == "policy" and str(stalled).endswith("is stopped; stopped; the same command goes on.")
    assert Stalled("", ["reward model 3"], "").who == "reward model"
    story = tell((4, stalled), None)
    story.go()
    assert story.began == ["anew", "step_000002"]


def test_a_run_that_began_anew_goes_on_with_itself(tell: Callable[..., Story], tmp_path: Path) -> None:
    tell(None).go()  # an earlier run of this name, to step 8
    story = tell((4, DIED), (4, WorkerDied("", "rollout")), None, resume_mode="disable")
    story.go()
    assert story.began == ["anew", "step_000002", "step_000002"]
    assert (tmp_path / "p/run.1/checkpoints/step_000008").is_dir()


def test_a_run_that_was_given_a_checkpoint_goes_on_with_its_own(tell: Callable[..., Story], tmp_path: Path) -> None:
    """Newer ones of an earlier time lie beside them."""
    tell(None).go()
    given = {"resume_mode": "resume_path", "resume_from_path": str(tmp_path / "p/run/checkpoints/step_000002")}
    story = tell((4, DIED), (6, DIED), None, **given)
    story.go()
    assert story.began == ["step_000002", "step_000002", "step_000004"]


def test_damage_is_passed_over(tell: Callable[..., Story], monkeypatch: pytest.MonkeyPatch) -> None:
    story = tell((5, DIED), None)
    monkeypatch.setattr("alphaapollo.launch.resume.damage", lambda path: ["x"] if path.name == "step_000004" else [])
    story.go()
    assert story.began == ["anew", "step_000002"]


def test_where_nothing_can_be_gone_on_from_both_reasons_are_told(
    tell: Callable[..., Story], monkeypatch: pytest.MonkeyPatch
) -> None:
    story = tell((5, DIED))
    monkeypatch.setattr("alphaapollo.launch.resume.damage", lambda _: ["progress.json has other bytes"])
    with pytest.raises(NotRestarted, match=r"died: killed; and it cannot be restarted: no checkpoint .* other bytes"):
        story.go()


def test_nothing_is_left_of_the_one_that_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RUN, raising=False)  # of a test before, in the same process
    before, left = dict(os.environ), []

    def start() -> None:
        with nothing_left(config_of(tmp_path, controller="ray")):
            left.append(name_run())
            os.environ["A_LIBRARYS_OWN"] = "1"
            left.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
            while not processes_of_run(left[0]):  # the child has not taken its own program yet
                pass
            raise DIED

    with pytest.raises(WorkerDied):
        start()
    run_id, orphan = left
    assert orphan.wait() == -9 and processes_of_run(run_id) == []
    assert dict(os.environ) == before and RUN not in before
