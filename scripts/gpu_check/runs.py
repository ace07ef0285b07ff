"""Whole runs for the checks, each as a user starts it: the quickstart's task and untrained model, a few small steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from scripts.checks import ROOT
from scripts.gpu_check.kit import Kit, need

REWARD = "def compute_score(prompt, completion):\n    return sum(map(str.isdigit, completion)) / 10\n"
SMALL = [
    "algorithm.adv_estimator=grpo",
    "env.rollout.n=4",
    "data.train_batch_size=8",
    "data.max_prompt_length=64",
    "data.max_response_length=32",
    "actor_rollout_ref.actor.ppo_mini_batch_size=32",
    "actor_rollout_ref.actor.optim.lr=1e-4",
    "actor_rollout_ref.rollout.max_num_seqs=32",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.2",
    "trainer.test_freq=-1",
    "trainer.export_hf=false",
]


def train(kit: Kit, name: str, *words: str) -> list[dict[str, float]]:
    """Its metrics, one dictionary an iteration. Raises RuntimeError with the end of what a failed run printed."""
    need("hydra", "omegaconf", "pandas", "rich")
    from examples.quickstart.make_task import make_data, make_model, make_tokenizer

    task = kit.folder / "task"
    if not task.exists():
        make_tokenizer(task / "model")
        make_model(task / "model", seed=0)
        make_data(task / "data", seed=0, num_sft=16, num_rl=64, num_val=8)
        (task / "reward.py").write_text(REWARD)
    command = [
        *(sys.executable, "-m", "alphaapollo.trainer.main_ppo", *SMALL, *words),
        f"actor_rollout_ref.model.path={task / 'model'}",
        f"data.train_files={task / 'data' / 'train.parquet'}",
        f"custom_reward_function.path={task / 'reward.py'}",
        f"trainer.device={kit.device}",
        f"trainer.output_dir={kit.folder / 'runs'}",
        f"trainer.experiment_name={name}",
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=kit.folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n")
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise RuntimeError(f"{name} ended with {done.returncode}: {lines[-1] if lines else 'it said nothing'}")
    return read(kit.folder / "runs" / "alphaapollo" / name / "metrics.jsonl")


def read(path: Path) -> list[dict[str, float]]:
    lines = map(json.loads, path.read_text().splitlines())
    return [line for line in lines if line["step"]]  # 0 is what came before the first
