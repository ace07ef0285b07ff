"""Recipes with a tiny model and a few rows: one real iteration, then the evaluation of its model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.recipes import RECIPES
from tests.loop.conftest import run_forked
from tests.page_commands import NEEDS_PLUGINS
from tests.unit.examples.test_recipes import prepared  # noqa: F401 (a fixture)

REWARD = '''
def compute_score(prompt, trajectory):
    """Reward digits in all turns, because an untrained model calls no tool and gives no answer."""
    digits = sum(letter.isdigit() for turn in trajectory.turns for letter in turn.text)
    return {"reward": digits / 10, "accuracy": float(digits % 2)}
'''
SHORT = (
    "data.max_response_length=400",
    "env.max_steps=2",
    "env.max_tokens_per_turn=16",
    "trainer.controller=local",
)
SMALL = (
    "actor_rollout_ref.model.path=model",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "actor_rollout_ref.rollout.kv_cache_gib=0.1",
    "custom_reward_function.path=reward.py",
    "data.train_batch_size=2",
    "data.val_files=",
    "env.rollout.n=4",
    "trainer.total_training_steps=1",
)


NIGHTLY = pytest.param("math_tools", marks=pytest.mark.nightly)


@pytest.mark.parametrize("task", [NIGHTLY, pytest.param("search", marks=NEEDS_PLUGINS)])  # local_rag is a plug-in's
def test_a_recipe_trains_and_evaluates(task: str, prepared: Path, tmp_path: Path):  # noqa: F811
    (prepared / "reward.py").write_text(REWARD)
    recipe = ["--config-dir", RECIPES / task, *SHORT, "--config-name"]
    run_forked("alphaapollo.trainer.main_ppo", [*recipe, "one_gpu", *SMALL], tmp_path / "train.txt", prepared)
    folder = prepared / "outputs" / "recipes"
    steps = [json.loads(line) for line in (folder / f"{task}_one_gpu" / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1]["actor/grad_norm"] > 0 and steps[-1]["num_turns/mean"] > 1
    model = [f"model.path=outputs/recipes/{task}_one_gpu/model", "rollout.kv_cache_gib=0.1", "data.max_samples=2"]
    run_forked("alphaapollo.trainer.main_generation", [*recipe, "evaluate", *model], tmp_path / "out.txt", prepared)
    assert (folder / f"{task}_evaluation" / "summary.json").exists()
