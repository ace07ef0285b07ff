"""The asynchronous modes against the synchronous loop on the real engine: whole runs of main_ppo, one after the other.

    .venv/bin/python scripts/bench/async_engine.py

A random model ends its text with each token at the same chance, so lengths are geometric: about 270, cut at 1,024.
Seconds are the mean over the iterations in the middle: the first ones warm up, and in the last ones nothing new begins.
The last line is a JSON object; `ratio` is the synchronous seconds over those of carry.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.bench._task import SIZES, machine, make_model, make_prompts, make_reward  # noqa: E402

FOLDER = ROOT / "outputs" / "bench" / "async_engine"
FIGURES = ("timing/step", "timing/generate", "timing/update", "staleness/mean", "staleness/max", "mismatch/k3")


def run(name: str, args: argparse.Namespace, *overrides: str) -> dict[str, float]:
    """Means of the figures over the iterations in the middle."""
    keys = {
        "algorithm.adv_estimator": "grpo",
        "algorithm.rollout_correction.method": "tis",
        "actor_rollout_ref.model.path": FOLDER / "model",
        "actor_rollout_ref.actor.ppo_mini_batch_size": args.prompts * args.group,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 8192,
        "actor_rollout_ref.rollout.kv_cache_gib": 0.5,
        "custom_reward_function.path": make_reward(FOLDER),
        "data.train_files": FOLDER / "train.parquet",
        "data.train_batch_size": args.prompts,
        "data.max_prompt_length": 64,
        "data.max_response_length": args.longest,
        "env.rollout.n": args.group,
        "trainer.output_dir": FOLDER,
        "trainer.project_name": "runs",
        "trainer.experiment_name": name,
        "trainer.total_training_steps": args.iterations,
        "trainer.save_freq": -1,
        "trainer.export_hf": False,
        "trainer.resume_mode": "disable",
    }
    words = [*(f"{key}={value}" for key, value in keys.items()), *overrides]
    done = subprocess.run(
        [sys.executable, "-m", "alphaapollo.trainer.main_ppo", *words],
        cwd=ROOT,
        env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{name} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}")
    lines = [json.loads(line) for line in (FOLDER / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    middle = [line for line in lines if 2 < line["step"] <= args.iterations - args.staleness - 1]
    return {key: round(sum(line.get(key, 0.0) for line in middle) / len(middle), 4) for key in FIGURES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8, help="of an iteration")
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--staleness", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=12)
    args = parser.parse_args()
    shutil.rmtree(FOLDER, ignore_errors=True)
    make_model(FOLDER / "model", SIZES["3M"])
    make_prompts(FOLDER / "train.parquet", 512)
    modes = {"synchronous": ()} | {
        mode: (f"trainer.async_mode={mode}", f"trainer.max_staleness={args.staleness}")
        for mode in ("carry", "separate")
    }
    figures = {}
    for name, overrides in modes.items():
        figures[name] = run(name, args, *overrides)
        print(f"{name}: {figures[name]}", file=sys.stderr, flush=True)
    seconds = {name: own["timing/step"] for name, own in figures.items()}
    result = {
        "benchmark": "async_engine",
        "ratio": round(seconds["synchronous"] / seconds["carry"], 3),
        "ratio_separate": round(seconds["synchronous"] / seconds["separate"], 3),
        "figures": figures,
        **machine(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
