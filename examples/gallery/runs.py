"""The gallery's runs: the shipped recipes with the settings that fit them to the task."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd

from alphaapollo.config.load import find_shipped_config_folder

GROUP = ("data.train_batch_size=32", "env.rollout.n=8")
ALONE = ("data.train_batch_size=256", "env.rollout.n=1")
ON_POLICY = (
    "actor_rollout_ref.actor.ppo_mini_batch_size=256",  # one optimizer step per iteration
    "trainer.test_freq=20",
)
ROUGH_ENGINE = (
    *GROUP,
    "actor_rollout_ref.rollout.dtype=bfloat16",
)  # in float32, engine and trainer have no mismatch to correct
FIT = {  # recipes that need more than a group size
    "ppo": ALONE,
    "reference_kl_dual": (*ALONE, "algorithm.kl_ctrl.target_kl=1.0"),  # short answers
    "gpg": (*GROUP, *ON_POLICY),
    "opo": (*GROUP, *ON_POLICY),
    "remax": (*ALONE, *ON_POLICY),
    "reinforce": (*ALONE, *ON_POLICY),
    "ppo_kl": ALONE,
    "trpo": (*GROUP, *ON_POLICY),
    "pods": ("data.train_batch_size=32", "env.rollout.n=32", "algorithm.filtration.size=8"),
    "rloo": (*GROUP, *ON_POLICY),
    "reinforce_plus_plus": ALONE,
    "gdpo": (*GROUP, "algorithm.gdpo_rewards=[accuracy,format]"),
    "magistral": (*GROUP, "reward.components={}", "reward.required=[]"),  # sums have no thoughts and no language
    "prorl": (*GROUP, "algorithm.reference_reset.patience=null", "algorithm.reference_reset.every=16"),
    "tis": ROUGH_ENGINE,
    "icepop": ROUGH_ENGINE,
    "mis": ROUGH_ENGINE,
    "grpo_passk_analytic": (*GROUP, "algorithm.passk_k=4"),
    # with grpo's division by the group's deviation, one token would count as much as a right answer
    "length_budget": (*GROUP, "algorithm.adv_estimator=dr_grpo"),
}
ELSEWHERE = {  # recipes that need teachers (distill, teachers, self_distillation) or turns (examples/grid_world)
    *("distill", "mopd", "sdft", "sdpo"),
    *("turn_ppo", "turn_group"),
}
LONGER = 2.5  # factor on iterations for recipes with one optimizer step per iteration instead of four
LENGTH_BUDGET = 40  # tokens, for length_budget: answers have 31 to 37


def recipes() -> list[str]:
    """Names in configs/algorithm that can run on the task."""
    return sorted({path.stem for path in (find_shipped_config_folder() / "algorithm").glob("*.yaml")} - ELSEWHERE)


def num_iterations(recipe: str, iterations: int) -> int:
    """Number of iterations of a recipe, `iterations` for most."""
    return int(LONGER * iterations) if set(ON_POLICY) <= set(FIT.get(recipe, ())) else iterations


def prepare(folder: Path, seed: int) -> None:
    """Make the task and the warmed-up model of one seed, if missing. The teacher carries with probability 0.5, which is
    harder than the quickstart and separates the algorithms."""
    if (folder / "sft" / "model" / "config.json").exists():
        return
    coin = ("--carry_rate", "0.5", "--wrong_carry_rate", "0.5", "--num_sft", str(900 * 32), "--all_sums")
    python("-m", "examples.quickstart.make_task", "--out", str(folder), "--seed", str(seed), *coin)
    rows = pd.read_parquet(folder / "data" / "train.parquet")
    rows["extra_info"] = [info | {"length_budget": LENGTH_BUDGET} for info in rows["extra_info"]]
    rows.to_parquet(folder / "data" / "train.parquet")
    python(
        *("-m", "alphaapollo.trainer.main_sft", "--config-dir", "examples/quickstart", "--config-name", "sft"),
        f"data.train_files={folder / 'data' / 'sft.parquet'}",
        f"model.path={folder / 'model'}",
        f"trainer.output_dir={folder.parent}",
        f"trainer.project_name={folder.name}",
        f"trainer.seed={seed}",
        "trainer.total_training_steps=900",
    )


def train(folder: Path, recipe: str, seed: int, iterations: int) -> None:
    """Train one recipe. A finished run is skipped, an interrupted one restarts. Raises CalledProcessError."""
    iterations = num_iterations(recipe, iterations)
    if is_done(folder / recipe, iterations):
        return
    python(
        *("-m", "alphaapollo.trainer.main_ppo", "--config-dir", "examples/gallery", "--config-name", "budget"),
        f"algorithm={recipe}",
        f"data.train_files={folder / 'data' / 'train.parquet'}",
        f"data.val_files={folder / 'data' / 'val.parquet'}",
        f"actor_rollout_ref.model.path={folder / 'sft' / 'model'}",
        f"trainer.output_dir={folder.parent}",
        f"trainer.project_name={folder.name}",
        f"trainer.experiment_name={recipe}",
        f"trainer.total_training_steps={iterations}",
        f"trainer.seed={seed}",
        "trainer.resume_mode=disable",
        *FIT.get(recipe, GROUP),
    )


def is_done(run: Path, iterations: int) -> bool:
    lines = read_metrics(run)
    return bool(lines) and lines[-1]["step"] == iterations


def read_metrics(run: Path) -> list[dict[str, float]]:
    """Lines of a run's metrics.jsonl; empty if it has not started."""
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def python(*words: str) -> None:
    """Run this interpreter with the output of this process."""
    subprocess.run([sys.executable, *words], check=True, env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"})
