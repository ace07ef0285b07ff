"""Recipes with a tiny model and a few rows: one real iteration, then the evaluation of its model."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from scripts.recipes import RECIPES
from tests.loop.conftest import DEADLINE
from tests.loop.warm import Program
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


def run(module: str, folder: Path, *words: str) -> str:
    """Run a command in the folder, forked from the warm process. Returns its output."""
    program = Program(module, words, folder / "output.txt", dict(os.environ), folder, warm=True)
    try:
        code = program.wait(DEADLINE)
    finally:
        program.signal(9)
    assert code == 0, program.printed[-6000:]
    return program.printed


@pytest.mark.parametrize("task", ["math_tools", "search"])
def test_a_recipe_trains_and_evaluates(task: str, prepared: Path):  # noqa: F811
    (prepared / "reward.py").write_text(REWARD)
    recipe = ["--config-dir", str(RECIPES / task), *SHORT]
    run("alphaapollo.trainer.main_ppo", prepared, *recipe, "--config-name", "one_gpu", *SMALL)
    folder = prepared / "outputs" / "recipes"
    steps = [json.loads(line) for line in (folder / f"{task}_one_gpu" / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1]["actor/grad_norm"] > 0 and steps[-1]["num_turns/mean"] > 1
    words = [
        "--config-name",
        "evaluate",
        f"model.path=outputs/recipes/{task}_one_gpu/model",
        "rollout.kv_cache_gib=0.1",
    ]
    run("alphaapollo.trainer.main_generation", prepared, *recipe, *words, "data.max_samples=2")
    assert (folder / f"{task}_evaluation" / "summary.json").exists()
