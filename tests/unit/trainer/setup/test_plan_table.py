from types import SimpleNamespace
from typing import Any

import pytest

from alphaapollo.config.load import load_config_and_user_settings
from alphaapollo.config.schema import Config
from alphaapollo.controller.placement import Machine
from alphaapollo.runs.resume import StartPoint
from alphaapollo.session.progress import TrainingGoal
from alphaapollo.types import Prompt
from tests.unit.session.steps import prepare_plan


@pytest.fixture
def table(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Settings of a plan, label -> text."""
    monkeypatch.chdir(tmp_path)
    for name in ("rows.parquet", "config.json", "reward.py"):
        (tmp_path / name).write_text("{}")

    def rows(*argv: str, has_reward_function: bool = True) -> dict[str, str]:
        needed = [f"actor_rollout_ref.model.path={tmp_path}", "data.train_files=rows.parquet"]
        config, user_settings = load_config_and_user_settings(
            Config, "ppo", [*needed, "data.val_files=rows.parquet", *argv]
        )
        prepared: Any = prepare_plan(config, Machine(num_cores=8, num_gpus=0), user_settings)
        prepared.prompts, prepared.val_prompts, prepared.sources = [Prompt(0, "sums", "1+1=")] * 64, [None] * 8, {}
        prepared.goal = TrainingGoal(2)
        prepared.has_reward_function, prepared.start = has_reward_function, StartPoint(tmp_path)
        prepared.renderer = SimpleNamespace(describe_stops=lambda: "</s>")
        settings: dict[str, str] = prepared.describe().settings
        return settings

    return rows


def test_plan_of_the_defaults(table: Any):
    rows = table("algorithm.adv_estimator=grpo", "env.rollout.n=8", "actor_rollout_ref.rollout.dtype=bfloat16")
    assert rows["preset"] == "none"
    assert rows["env"] == "single_turn, rollout.n=8"
    assert rows["reward"] == "the functions of the rows' data sources"
    assert rows["learning rate"] == "1e-06, constant"
    assert rows["validation"].split(", ") == ["before training", "every 20 iterations", "at the end"]
    assert rows["checkpoints"].startswith("every 20 iterations, and at the end; ")
    assert rows["model"].endswith(", float32, engines bfloat16")


def test_a_recipe_and_its_schedules(table: Any):
    optim = "actor_rollout_ref.actor.optim"
    rows = table(
        "algorithm=ppo",
        f"{optim}.lr=3e-6",
        f"{optim}.warmup_style=cosine",
        f"{optim}.lr_warmup_steps_ratio=0.1",
        "critic.optim.lr_warmup_steps=5",
        "trainer.test_freq=-1",
        "trainer.save_freq=7",
    )
    assert rows["preset"] == "algorithm=ppo"
    assert rows["learning rate"] == "3e-06, cosine; critic 1e-05, constant"
    assert "optim.lr_warmup_steps_ratio=0.1" in rows["actor_rollout_ref.actor"]
    assert rows["validation"] == "before training" and rows["checkpoints"].startswith("every 7 iterations, ")
