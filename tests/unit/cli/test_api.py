from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import alphaapollo
from alphaapollo import api
from alphaapollo.config.errors import ConfigError
from alphaapollo.config.keys import format_settings
from alphaapollo.config.load import load_config
from alphaapollo.config.schema import Config, GenerationConfig
from alphaapollo.results import Evaluation, TrainedRun


def score(prompt: object, completion: str) -> float:
    return 1.0


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Configuration with which a run would start."""
    calls: list[Any] = []
    monkeypatch.setattr(api, "run_in_child_process", lambda *arguments: calls.append(arguments))
    return calls


def test_unknown_name_of_the_package() -> None:
    with pytest.raises(AttributeError, match="no attribute 'rll'"):
        alphaapollo.rll  # noqa: B018


def test_dict_is_converted_to_words(tmp_path: Path) -> None:
    settings = {
        "algorithm": "dapo",
        "algorithm.lam": np.float64(0.5),
        "trainer": {"seed": 1, "experiment_name": "x y='z'"},
        "trainer.nnodes": 2,
        "actor_rollout_ref": {"actor.optim": {"lr": 1}, "actor": {"optim.betas": (0.9, 0.95)}},
        "data.train_files": (tmp_path / "a.parquet",),
    }
    config = load_config(Config, "ppo", format_settings(settings, Config))
    assert config.algorithm.filter_groups.enable and config.algorithm.lam == 0.5
    assert (config.trainer.seed, config.trainer.experiment_name, config.trainer.nnodes) == (1, "x y='z'", 2)
    optim = config.actor_rollout_ref.actor.optim
    assert (optim.lr, list(optim.betas)) == (1, [0.9, 0.95])
    assert config.data.train_files == [str(tmp_path / "a.parquet")]
    teachers = {"teacher": {"models": {"qwen2.5": {"path": "m"}, "policy": {"path": "p"}}}}
    config = load_config(Config, "ppo", format_settings(teachers, Config))
    assert config.teacher.models["qwen2.5"].path == "m", "a name of the user's may have dots"
    with pytest.raises(ConfigError, match=r"Set it once"):
        format_settings({"trainer.seed": 1, "trainer": {"seed": 2}}, Config)


def test_keys_of_a_dict_win_over_its_preset_and_words_over_both(started: list[Any], tmp_path: Path) -> None:
    settings = {"algorithm": "dapo", "env.rollout.n": 3, "trainer": {"output_dir": str(tmp_path)}}
    run = api.rl(settings, "trainer.seed=5", show=False)
    assert isinstance(run.config, Config)
    assert (run.config.algorithm.filter_groups.enable, run.config.group_size, run.config.trainer.seed) == (True, 3, 5)
    assert run.folder == tmp_path / "alphaapollo/default"
    ((module, words, folder, told, show),) = started
    assert (module, folder, told, show) == ("alphaapollo.trainer.main_ppo", run.folder, None, False)
    assert words[-1] == "trainer.seed=5"


def test_a_yaml_file_and_python_objects(started: list[Any], tmp_path: Path) -> None:
    (tmp_path / "own.yml").write_text(f"trainer: {{output_dir: '{tmp_path}'}}\n")
    run = api.rl(tmp_path / "own.yml", reward=score)
    beside = tmp_path / "alphaapollo/.default.objects/reward.py"
    assert run.config.custom_reward_function.path == str(beside)  # type: ignore[union-attr]
    assert beside.is_file()
    with pytest.raises(ConfigError, match=r"reward_function\.path=mine\.py is set"):
        api.rl(tmp_path / "own.yml", "custom_reward_function.path=mine.py", reward=score)


def test_invalid_key_is_reported_before_imports(started: list[Any]) -> None:
    with pytest.raises(ConfigError, match=r"Did you mean 'trainer\.seed"):
        api.rl({"trainer.sed": 1})
    with pytest.raises(ConfigError, match=r"Did you mean 'model\.path"):
        api.sft({"model.pth": "x"})
    assert not started


def test_a_trained_run(tmp_path: Path) -> None:
    lines = [{"step": 0, "val/accuracy": 0.1}, {"step": 1, "critic/score/mean": 0.5, "kl/mean": None}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = TrainedRun(tmp_path, Config())
    assert list(run.metrics.index) == [0, 1]
    assert run.metrics["val/accuracy"].dropna().to_dict() == {0: 0.1}
    assert run.metrics["kl/mean"].isna().all()
    (axes,) = run.plot().axes
    assert {line.get_label() for line in axes.lines} == {"critic/score/mean", "val/accuracy"}
    with pytest.raises(ValueError, match="has no values of 'reward/meen'"):
        run.plot("reward/meen")
    with pytest.raises(ValueError, match="no model and no complete checkpoint"):
        _ = run.model
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    assert run.model == tmp_path / "model"


def test_an_evaluation(tmp_path: Path) -> None:
    (tmp_path / "summary.csv").write_text(
        "data_source,figure,value,low,high,problems\n,pass@1,0.5,0.25,0.75,8\n,response_length,20,18,22,8\n"
    )
    result = {"prompt_id": 0, "text": "a model writes\u2028line ends\x85 of all kinds"}
    (tmp_path / "results.jsonl").write_text(json.dumps(result, ensure_ascii=False) + "\n", encoding="utf-8")
    done = Evaluation(tmp_path, GenerationConfig(model={"path": "m"}))
    assert list(done.metrics["figure"]) == ["pass@1", "response_length"]
    assert done.results == [result]
    assert done.model == "m"
    (axes,) = done.plot().axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["pass@1"]
