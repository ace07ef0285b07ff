from pathlib import Path

import pytest

from alphaapollo.config.schema import Config
from alphaapollo.launch.input_checks import find_local_paths


def test_what_workers_read_and_what_lies_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "reward.py").touch()
    (tmp_path / "vllm").mkdir()
    (tmp_path / "data.parquet").touch()
    config = Config.model_validate(
        {
            "actor_rollout_ref": {"model": {"path": str(tmp_path / "model")}},
            "critic": {"model": {"path": "owner/of-the-hub"}},
            "custom_reward_function": {"path": "reward.py"},
            "data": {"train_files": "./data.parquet"},
            "trainer": {"output_dir": str(tmp_path)},
        }
    )
    assert find_local_paths(config) == {
        "actor_rollout_ref.model.path": str(tmp_path / "model"),
        "custom_reward_function.path": "reward.py",
    }
