"""Complete runs of main_ppo with Ray, FSDP2 and vLLM, measured by the metrics of the run."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.bench._task import SIZES, make_model, make_prompts, make_reward

ROOT = Path(__file__).resolve().parents[2]


def begin(folder: Path, size: str) -> None:
    """Write the model and the prompts to an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    make_model(folder / "model", SIZES[size])
    make_prompts(folder / "train.parquet", 512)


def run(folder: Path, name: str, args: argparse.Namespace, *overrides: str) -> list[dict[str, float]]:
    """Train with GRPO on the output of `begin` and return the lines of metrics.

    args: prompts, group (samples per prompt), longest (tokens of a response), iterations.
    """
    keys = {
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.model.path": folder / "model",
        "actor_rollout_ref.actor.ppo_mini_batch_size": args.prompts * args.group,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 8192,
        "actor_rollout_ref.rollout.kv_cache_gib": 0.5,
        "custom_reward_function.path": make_reward(folder),
        "data.train_files": folder / "train.parquet",
        "data.train_batch_size": args.prompts,
        "data.max_prompt_length": 64,
        "data.max_response_length": args.longest,
        "env.rollout.n": args.group,
        "trainer.output_dir": folder,
        "trainer.project_name": "runs",
        "trainer.experiment_name": name,
        "trainer.total_training_steps": args.iterations,
        "trainer.save_freq": -1,
        "trainer.export_hf": False,
        "trainer.resume_mode": "disable",
    }
    return train(keys, os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}, *overrides)


def train(keys: Mapping[str, object], environment: Mapping[str, str], *overrides: str) -> list[dict[str, float]]:
    """Run main_ppo with these keys and return its lines of metrics. Exits if the run fails."""
    folder = Path(*(str(keys[f"trainer.{part}"]) for part in ("output_dir", "project_name", "experiment_name")))
    words = [*(f"{key}={value}" for key, value in keys.items()), *overrides]
    done = subprocess.run(
        [sys.executable, "-m", "alphaapollo.trainer.main_ppo", *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{folder.name} exited with status {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}")
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def means(lines: Sequence[dict[str, float]], names: Sequence[str]) -> dict[str, float]:
    """Mean of each metric over the lines; a missing value counts as 0."""
    return {name: sum(line.get(name, 0.0) for line in lines) / len(lines) for name in names}
