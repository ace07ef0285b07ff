"""Effect of a start on an existing run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from alphaapollo.config.keys import format_value, get_value
from alphaapollo.config.schema import Config
from alphaapollo.runs.resume import StartPoint, find_start_point, resume_hint
from alphaapollo.runs.run_plan import RunPlan, read_run_plan
from tests.unit.run_folders import change_keys, log_steps, make_config, train

DECAY = "actor_rollout_ref.actor.optim.weight_decay"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return make_config(tmp_path, data={"train_files": "a.parquet"})


@pytest.fixture
def run(config: Config) -> Path:
    return config.trainer.folder


def read_configs(run: Path) -> dict[str, Any]:
    return {file.name: yaml.safe_load(file.read_text()) for file in run.glob("*.yaml")}


def resume_from(config: Config, checkpoint: Path, **keys: Any) -> Config:
    path = {"resume_mode": "resume_path", "resume_from_path": str(checkpoint)} | keys
    return change_keys(config, {f"trainer.{key}": value for key, value in path.items()})


def test_a_new_run_notes_its_configuration(config: Config, run: Path) -> None:
    start = find_start_point(config)
    assert start == StartPoint(run) and start.describe() == []
    assert "no checkpoint was written" in resume_hint(run)
    assert not run.exists(), "nothing is touched before the run starts"
    assert start.prepare_folder(config, RunPlan({})) is None
    assert read_configs(run) == {"config.yaml": config.model_dump(mode="json")}
    assert find_start_point(config) == StartPoint(run), "a start that failed leaves nothing of worth"


def test_same_configuration_resumes_without_changes(config: Config, run: Path) -> None:
    checkpoint = train(config, 20)
    unfinished = checkpoint.with_name(".writing_step_000040")
    unfinished.mkdir()
    start = find_start_point(config)
    assert start == StartPoint(run, checkpoint, 20, last_logged_step=20)
    assert start.describe() == [f"resumes from {checkpoint}."]
    assert resume_hint(run).endswith(f"resumes from {checkpoint}")
    start.prepare_folder(config, RunPlan({}))
    assert read_configs(run).keys() == {"config.yaml"} and checkpoint.exists() and not unfinished.exists()
    log_steps(run, *range(30))  # a kill, or a checkpoint that is gone
    assert find_start_point(config).describe() == [f"resumes from {checkpoint}; iterations 21 to 29 are repeated."]


def test_changes_are_reported_and_every_configuration_is_saved(config: Config, run: Path) -> None:
    train(config, 2)
    second = change_keys(config, {DECAY: 0.5})
    changes = find_start_point(second).describe()[1:]
    assert [line.split(": ")[1:] for line in changes] == [[DECAY, "0.01 -> 0.5", "applied"]]
    train(second, 4)
    third = change_keys(config, {"data.seed": 3, "trainer.val_before_train": False})
    changes = find_start_point(third).describe()[1:]
    assert [line.split(" (")[0].split(": ")[1:] for line in changes] == [
        ["data.seed", "0 -> 3", "applied"],
        [DECAY, "0.5 -> 0.01", "applied"],
        ["trainer.val_before_train", "true -> false", "kept"],
    ]
    train(third, 6)
    saved = {"config.yaml": config, "config.1.yaml": second, "config.2.yaml": third}
    assert read_configs(run) == {name: one.model_dump(mode="json") for name, one in saved.items()}


@pytest.mark.parametrize(("kind", "verdict"), [("fixed", "applied"), ("adaptive", "kept")])
def test_only_a_moving_kl_controller_keeps_its_coefficient(config: Config, kind: str, verdict: str) -> None:
    key = "algorithm.kl_ctrl.kl_coef"
    before = change_keys(config, {"algorithm.kl_ctrl.type": kind, key: 0.1})
    train(before, 2)
    (change,) = find_start_point(change_keys(before, {key: 0.2})).config_changes
    assert (change.key, change.verdict) == (key, verdict)


IDENTITY = {  # some of the keys: tests/unit/config/test_changes.py lists all
    "actor_rollout_ref.model.path": "other",
    "data.train_files": "other",
    "algorithm.adv_estimator": "other",
}


@pytest.mark.parametrize("key", IDENTITY)
def test_another_run_is_refused_with_differences_and_fix(config: Config, tmp_path: Path, key: str) -> None:
    checkpoint = train(config, 2)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(ValueError) as error:
        find_start_point(change_keys(config, {key: IDENTITY[key]}))
    difference = f"{key}={format_value(get_value(config, key))} (now {format_value(IDENTITY[key])})"
    fixes = ("another trainer.experiment_name", "resume_mode=disable", f"trainer.resume_from_path={checkpoint}")
    assert [fact for fact in (difference, *fixes) if fact not in str(error.value)] == []
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_requested_checkpoint_of_another_run_is_used(config: Config) -> None:
    checkpoint = train(config, 2)
    other = resume_from(change_keys(config, {"data.train_files": "b.parquet"}), checkpoint, experiment_name="second")
    start = find_start_point(other)
    assert (start.checkpoint, start.step, start.replaces_previous_run) == (checkpoint, 2, False)
    assert [(one.key, one.verdict) for one in start.config_changes] == [("data.train_files", "applied")]
    start.prepare_folder(other, RunPlan({}))
    assert read_configs(other.trainer.folder).keys() == {"config.yaml"}
    with pytest.raises(ValueError, match=r"elsewhere' .*step_000002"):
        find_start_point(resume_from(config, Path("elsewhere")))


def test_a_run_without_a_checkpoint_is_moved_aside(config: Config, run: Path) -> None:
    find_start_point(config).prepare_folder(config, RunPlan({}))
    log_steps(run, 1)
    start = find_start_point(config)
    (line,) = start.describe()
    assert start.replaces_previous_run and "from scratch" in line and str(run) in line
    moved = start.prepare_folder(config, RunPlan({"iterations": "8"}))
    assert moved == run.with_name("run.1") and (moved / "metrics.jsonl").exists()
    assert (read_run_plan(moved), read_run_plan(run)) == (RunPlan({}), RunPlan({"iterations": "8"}))
    assert {file.name for file in run.iterdir()} == {"config.yaml", "format.json", "plan.json"}
    train(config, 2)
    assert find_start_point(change_keys(config, {"trainer.resume_mode": "disable"})) == start


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("config.yaml", "a: [", r"config\.yaml cannot be read .*expected node content.*experiment_name"),
        ("metrics.jsonl", None, r"a folder.*metrics\.jsonl"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(config: Config, run: Path, name: str, text: str | None, says: str) -> None:
    train(config, 2)
    (run / name).unlink()
    if text is None:
        (run / name).mkdir()
    else:
        (run / name).write_text(text)
    with pytest.raises((ValueError, OSError), match=says):
        find_start_point(config)


def test_damaged_checkpoint_is_named_and_skipped(config: Config) -> None:
    older, newer = train(config, 20), train(config, 40)
    (newer / "weights").write_text("41")
    start = find_start_point(config)
    assert (start.checkpoint, start.step) == (older, 20)
    skipped, resumes, aside = start.describe()
    assert skipped.endswith(f"{newer}: weights has changed.") and aside.endswith(": step_000040.")
    assert str(older) in resumes and "iterations 21 to 40 " in resumes
    start.prepare_folder(config, RunPlan({}))
    assert not newer.exists(), "else it would count for trainer.max_ckpt_to_keep"
    newer.with_name("aside_step_000040").rename(newer)
    (older / "weights").unlink()
    with pytest.raises(ValueError, match=r"40: weights has changed; .*weights cannot"):
        find_start_point(config)
    with pytest.raises(ValueError, match=r"step_000040: weights has changed\."):
        find_start_point(resume_from(config, newer))
    (newer / "weights").write_text("40")
    renamed = newer.rename(newer.with_name("step_000100"))
    with pytest.raises(ValueError, match=r"it is of iteration 40"):
        find_start_point(resume_from(config, renamed))


def test_later_checkpoints_are_set_aside_by_a_start_that_goes_back(config: Config) -> None:
    """Otherwise a start after a kill would resume from old files."""
    checkpoint, later = train(config, 20), train(config, 40)
    back = resume_from(config, checkpoint)
    start = find_start_point(back)
    assert start.describe()[1].endswith(" aside: step_000040.")
    start.prepare_folder(back, RunPlan({}))
    aside = later.with_name("aside_step_000040")
    assert checkpoint.exists() and not later.exists() and aside.is_dir()
    assert find_start_point(config).checkpoint == checkpoint
    train(config, 40)
    find_start_point(back).prepare_folder(back, RunPlan({}))
    assert not later.exists() and later.with_name("aside_step_000040.1").is_dir()
    assert aside.is_dir(), "what was set aside before stays"
