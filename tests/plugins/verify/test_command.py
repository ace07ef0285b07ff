"""The iteration that `alphaapollo verify` records has the settings of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from alphaapollo.config.load import save_config
from alphaapollo.config.schema import Config
from alphaapollo.plugins.verify import command


@pytest.mark.parametrize(("steps", "total"), [(100, "100"), (None, "1")])
def test_the_newest_start_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: Any, total: str) -> None:
    """The total number of steps, and with it the learning rate schedule, is that of the run."""
    given: list[str] = []
    monkeypatch.setattr(command.pkgutil, "resolve_name", lambda _: lambda words: given.extend(words) or 1)
    model, data = {"model": {"path": "model"}}, {"train_files": ["a.parquet"]}
    values = {"actor_rollout_ref": model, "data": data, "trainer": {"total_training_steps": steps}}
    for name in ("config.yaml", "config.1.yaml"):
        save_config(Config.model_validate(values), tmp_path / name)
    assert command.record_next_iteration(tmp_path, []) is None
    assert given[:2] == ["--config", str(tmp_path / "config.1.yaml")]
    assert {f"trainer.total_training_steps={total}", "trainer.stop_at_step=1"} <= {*given}
