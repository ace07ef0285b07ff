"""Effect of a start on an existing run folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from alphaapollo.config.keys import format_value
from alphaapollo.config.schema import Config, SftConfig
from alphaapollo.runs.checkpoint_folder import CheckpointFolder, write_progress
from alphaapollo.runs.resume import StartPoint, find_start_point, format_completed_run_message, resume_hint
from alphaapollo.runs.run_history import RunPlan, read_run_plan


def configured(out: Path, **sections: dict[str, Any]) -> Config:
    trainer = {"output_dir": str(out), "project_name": "p", "experiment_name": "run"} | sections.pop("trainer", {})
    return Config(trainer=trainer, data={"train_files": "a.parquet"} | sections.pop("data", {}), **sections)


def start_of(config: Config | SftConfig) -> StartPoint:
    return find_start_point(config)


def train(config: Config | SftConfig, step: int) -> Path:
    """Make the folder of a run that reached iteration `step`: configuration, metrics, a checkpoint."""
    folder = config.trainer.folder
    start_of(config).prepare_folder(config, RunPlan({}))
    log(folder, *range(step + 1))
    checkpoints = CheckpointFolder(folder / "checkpoints", keep=None)
    writing = checkpoints.begin_checkpoint(step)
    (writing / "weights").write_text(str(step))
    write_progress(writing, {"step": step})
    return checkpoints.complete_checkpoint(writing)


def log(folder: Path, *steps: int) -> None:
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in steps))


def saved(folder: Path) -> dict[str, Any]:
    return {file.name: yaml.safe_load(file.read_text()) for file in folder.glob("*.yaml")}


def test_a_new_run_notes_its_configuration(tmp_path: Path) -> None:
    config = configured(tmp_path)
    start = start_of(config)
    assert start == StartPoint(config.trainer.folder) and start.describe() == []
    assert not config.trainer.folder.exists(), "nothing is touched before the run starts"
    assert start.prepare_folder(config, RunPlan({})) is None
    assert saved(config.trainer.folder) == {"config.yaml": config.model_dump(mode="json")}


def test_same_configuration_resumes_without_changes(tmp_path: Path) -> None:
    config = configured(tmp_path)
    checkpoint = train(config, 20)
    start = start_of(config)
    assert start == StartPoint(config.trainer.folder, checkpoint, 20, last_logged_step=20)
    assert start.describe() == [f"resumes from {checkpoint}."]
    start.prepare_folder(config, RunPlan({}))
    assert saved(config.trainer.folder).keys() == {"config.yaml"}


def test_changes_are_reported_and_every_configuration_is_saved(tmp_path: Path) -> None:
    first = configured(tmp_path)
    train(first, 2)
    second = configured(tmp_path, actor_rollout_ref={"actor": {"optim": {"weight_decay": 0.5}}})
    start = start_of(second)
    decay = "actor_rollout_ref.actor.optim.weight_decay"
    assert [line.split(": ")[1:] for line in start.describe()[1:]] == [[decay, "0.01 -> 0.5", "applied"]]
    train(second, 4)
    third = configured(tmp_path, data={"seed": 3}, trainer={"val_before_train": False})
    changes = [line.split(" (")[0].split(": ")[1:] for line in start_of(third).describe()[1:]]
    assert changes == [
        ["data.seed", "0 -> 3", "applied"],
        [decay, "0.5 -> 0.01", "applied"],
        ["trainer.val_before_train", "true -> false", "kept"],
    ]
    train(third, 6)
    assert saved(third.trainer.folder) == {
        "config.yaml": first.model_dump(mode="json"),
        "config.1.yaml": second.model_dump(mode="json"),
        "config.2.yaml": third.model_dump(mode="json"),
    }


@pytest.mark.parametrize(("kind", "verdict"), [("fixed", "applied"), ("adaptive", "kept")])
def test_only_a_moving_kl_controller_keeps_its_coefficient(tmp_path: Path, kind: str, verdict: str) -> None:
    train(configured(tmp_path, algorithm={"kl_ctrl": {"type": kind, "kl_coef": 0.1}}), 2)
    (change,) = start_of(configured(tmp_path, algorithm={"kl_ctrl": {"type": kind, "kl_coef": 0.2}})).config_changes
    assert (change.key, change.verdict) == ("algorithm.kl_ctrl.kl_coef", verdict)


IDENTITY = (  # some of the keys: tests/unit/config/test_changes.py lists all
    *("actor_rollout_ref.model.path", "actor_rollout_ref.model.lora_rank", "critic.model.path", "data.train_files"),
    *("algorithm.adv_estimator", "actor_rollout_ref.actor.policy_loss.loss_mode", "env.env_name"),
    "env.reasoning_gym.tasks",
)


@pytest.mark.parametrize("key", IDENTITY)
def test_another_run_is_refused_with_differences_and_fix(tmp_path: Path, key: str) -> None:
    config = configured(tmp_path)
    checkpoint = train(config, 2)
    values = config.model_dump(mode="json")
    *parts, name = key.split(".")
    section = values
    for part in parts:
        section = section[part]
    new = {"lora_rank": 8, "tasks": ["other"]}.get(name, "other")
    old, section[name] = section[name], new
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(ValueError) as error:
        start_of(Config.model_validate(values))
    fixes = ("another trainer.experiment_name", "resume_mode=disable", f"trainer.resume_from_path={checkpoint}")
    for fact in (f"{key}={format_value(old)} (now {format_value(new)})", *fixes):
        assert fact in str(error.value)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_requested_checkpoint_of_another_run_is_used(tmp_path: Path) -> None:
    checkpoint = train(configured(tmp_path), 2)
    trainer = {"experiment_name": "second", "resume_mode": "resume_path", "resume_from_path": str(checkpoint)}
    config = configured(tmp_path, data={"train_files": "b.parquet"}, trainer=trainer)
    start = start_of(config)
    assert (start.checkpoint, start.step, start.replaces_previous_run) == (checkpoint, 2, False)
    assert [(one.key, one.verdict) for one in start.config_changes] == [("data.train_files", "applied")]
    start.prepare_folder(config, RunPlan({}))
    assert saved(config.trainer.folder).keys() == {"config.yaml"}


def test_path_without_checkpoint_lists_existing_ones(tmp_path: Path) -> None:
    train(configured(tmp_path), 4)
    trainer = {"resume_mode": "resume_path", "resume_from_path": str(tmp_path / "elsewhere")}
    with pytest.raises(ValueError, match=r"elsewhere' .*step_000004"):
        start_of(configured(tmp_path, trainer=trainer))


def test_a_run_without_a_checkpoint_is_moved_aside(tmp_path: Path) -> None:
    config = configured(tmp_path)
    folder = config.trainer.folder
    start_of(config).prepare_folder(config, RunPlan({}))
    assert start_of(config) == StartPoint(folder), "a start that failed leaves nothing of worth"
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    start = start_of(config)
    (line,) = start.describe()
    assert start.replaces_previous_run and "from scratch" in line and str(folder) in line
    assert start.prepare_folder(config, RunPlan({})) == folder.with_name("run.1")
    assert (folder.with_name("run.1") / "metrics.jsonl").exists()
    assert {file.name for file in folder.iterdir()} == {"config.yaml", "format.json", "plan.json"}


def test_interrupted_run_prints_its_resume_checkpoint(tmp_path: Path) -> None:
    config = configured(tmp_path)
    assert "no checkpoint was written" in resume_hint(config.trainer.folder)
    checkpoint = train(config, 2)
    assert resume_hint(config.trainer.folder).endswith(f"resumes from {checkpoint}")


def test_the_folder_of_another_command_is_refused(tmp_path: Path) -> None:
    config = configured(tmp_path)
    train(config, 2)
    sft = SftConfig(trainer={"output_dir": str(tmp_path), "project_name": "p", "experiment_name": "run"})
    with pytest.raises(ValueError, match=r"main_ppo run\. .*experiment_name"):
        find_start_point(sft)


@pytest.mark.parametrize(("text", "says"), [("a: [", "expected the node content"), ("7", "no configuration")])
def test_a_damaged_configuration_is_reported(tmp_path: Path, text: str, says: str) -> None:
    config = configured(tmp_path)
    train(config, 2)
    (config.trainer.folder / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match=rf"config\.yaml cannot be read .*{says}.*experiment_name"):
        start_of(config)


def test_a_model_is_exported_if_it_is_younger_than_the_checkpoint(tmp_path: Path) -> None:
    config = configured(tmp_path)
    checkpoint = train(config, 2)
    assert not start_of(config).has_exported_model()
    model = config.trainer.folder / "model"
    model.mkdir()
    os.utime(checkpoint / "progress.json", (100, 100))
    for written, exported in ((99, False), (100, True), (101, True)):
        os.utime(model, (written, written))
        assert start_of(config).has_exported_model() is exported
    assert "all 2 iterations are done" in format_completed_run_message(2)


def test_what_interrupted_saves_have_left_is_swept_up(tmp_path: Path) -> None:
    config = configured(tmp_path)
    checkpoint = train(config, 20)
    left = checkpoint.with_name(".writing_step_000040")
    left.mkdir()
    start_of(config).prepare_folder(config, RunPlan({}))
    assert checkpoint.exists() and not left.exists()


def test_damaged_checkpoint_is_named_and_skipped(tmp_path: Path) -> None:
    config = configured(tmp_path)
    older, newer = train(config, 20), train(config, 40)
    (newer / "weights").write_text("41")
    start = start_of(config)
    assert (start.checkpoint, start.step) == (older, 20)
    skipped, resumes, aside = start.describe()
    assert skipped.endswith(f"{newer}: weights has changed.") and aside.endswith(": step_000040.")
    assert str(older) in resumes and "iterations 21 to 40 " in resumes
    start.prepare_folder(config, RunPlan({}))
    assert not newer.exists(), "else it would count for trainer.max_ckpt_to_keep"
    newer.with_name("aside_step_000040").rename(newer)
    (older / "weights").unlink()
    with pytest.raises(ValueError, match=r"40: weights has changed; .*weights cannot"):
        start_of(config)
    asked = configured(tmp_path, trainer={"resume_mode": "resume_path", "resume_from_path": str(newer)})
    with pytest.raises(ValueError, match=r"step_000040: weights has changed\."):
        start_of(asked)


def test_reached_iteration_is_reported(tmp_path: Path) -> None:
    config = configured(tmp_path)
    checkpoint = train(config, 4)
    assert start_of(config).describe() == [f"resumes from {checkpoint}."]
    log(config.trainer.folder, *range(10))  # a kill, or a checkpoint that is gone
    (line,) = start_of(config).describe()
    assert str(checkpoint) in line and "iterations 5 to 9 " in line


def test_metrics_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    config = configured(tmp_path)
    train(config, 4)
    metrics = config.trainer.folder / "metrics.jsonl"
    metrics.unlink()
    metrics.mkdir()
    with pytest.raises(OSError, match=r"Is a directory.*metrics\.jsonl"):
        start_of(config)


@pytest.mark.parametrize(
    ("gone", "says"),
    [
        (("manifest.json",), "manifest.json cannot be read"),
        (("progress.json",), "progress.json cannot be read (No such file or directory)"),
        (("weights", "manifest.json", "progress.json"), "manifest.json cannot be read"),
    ],
)
def test_checkpoint_without_manifest_is_skipped(tmp_path: Path, gone: tuple[str, ...], says: str) -> None:
    config = configured(tmp_path)
    older, newer = train(config, 20), train(config, 40)
    for name in gone:
        (newer / name).unlink()
    start = start_of(config)
    assert start.checkpoint == older
    assert f"{newer}: {says}" in start.describe()[0]


def test_later_checkpoints_are_set_aside_by_a_start_that_goes_back(tmp_path: Path) -> None:
    """Otherwise a start after a kill would resume from old files."""
    config = configured(tmp_path)
    checkpoint, later = train(config, 20), train(config, 40)
    back = configured(tmp_path, trainer={"resume_mode": "resume_path", "resume_from_path": str(checkpoint)})
    start = start_of(back)
    assert start.describe()[1].endswith(" aside: step_000040.")
    start.prepare_folder(back, RunPlan({}))
    assert checkpoint.exists() and not later.exists() and later.with_name("aside_step_000040").is_dir()
    assert start_of(config).checkpoint == checkpoint
    again = train(config, 40)
    start_of(back).prepare_folder(back, RunPlan({}))
    assert not again.exists() and again.with_name("aside_step_000040.1").is_dir()
    assert again.with_name("aside_step_000040").is_dir(), "what was set aside before stays"


def test_checkpoint_with_the_name_of_another_iteration_is_skipped(tmp_path: Path) -> None:
    config = configured(tmp_path)
    checkpoint, later = train(config, 20), train(config, 40)
    renamed = later.rename(later.with_name("step_000100"))
    start = start_of(config)
    assert start.checkpoint == checkpoint
    assert str(renamed) in start.describe()[0] and "iteration 40" in start.describe()[0]


def test_the_plan_is_written_into_the_new_folder_of_a_run(tmp_path: Path) -> None:
    config = configured(tmp_path)
    train(config, 2)
    again = configured(tmp_path, trainer={"resume_mode": "disable"})
    moved = start_of(again).prepare_folder(again, RunPlan({"iterations": "8"}))
    assert moved and read_run_plan(moved) == RunPlan({})
    assert read_run_plan(config.trainer.folder) == RunPlan({"iterations": "8"})
