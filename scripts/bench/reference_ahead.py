"""The reference's log-probs beside generation against those after it: runs of main_ppo on the real engine, in turns.

    .venv/bin/python scripts/bench/reference_ahead.py

A random model ends its text with each token at the same chance, so lengths are geometric, and the last answers of an
iteration leave most of the engine idle. Both sides take the same draws; their seconds are the mean over all iterations
but the first two. The last line is a JSON object; `ratio` is the seconds of a step with the log-probs after generation
over those with them beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.bench._task import SIZES, machine, make_model, make_prompts, make_reward  # noqa: E402

FOLDER = ROOT / "outputs" / "bench" / "reference_ahead"
FIGURES = ("timing/step", "timing/generate", "timing/columns", "timing/update", "perf/reference_ahead")
WARM_UP = 2  # iterations


def run(ahead: bool, args: argparse.Namespace) -> dict[str, float]:
    """Means of the figures over one run's iterations."""
    name = "beside" if ahead else "after"
    keys = {
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.model.path": FOLDER / "model",
        "actor_rollout_ref.ref.log_probs_ahead": ahead,
        "actor_rollout_ref.actor.use_kl_loss": True,
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
    done = subprocess.run(
        [sys.executable, "-m", "alphaapollo.trainer.main_ppo", *(f"{key}={value}" for key, value in keys.items())],
        cwd=ROOT,
        env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{name} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}")
    lines = [json.loads(line) for line in (FOLDER / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    kept = [line for line in lines if line["step"] > WARM_UP]
    return {key: sum(line.get(key, 0.0) for line in kept) / len(kept) for key in FIGURES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="3M")
    parser.add_argument("--prompts", type=int, default=16, help="of an iteration")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.iterations <= WARM_UP:
        parser.error(f"--iterations {args.iterations}: the first {WARM_UP} warm up. Give more.")
    shutil.rmtree(FOLDER, ignore_errors=True)
    make_model(FOLDER / "model", SIZES[args.size])
    make_prompts(FOLDER / "train.parquet", 512)
    found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for _ in range(args.rounds):
        for ahead, own in found.items():
            own.append(run(ahead, args))
            print(f"{'beside' if ahead else 'after'}: {own[-1]}", file=sys.stderr, flush=True)
    after, beside = (
        {key: round(median(one[key] for one in found[ahead]), 4) for key in FIGURES} for ahead in (False, True)
    )
    result = {
        "benchmark": "reference_ahead",
        "size": args.size,
        "ratio": round(after["timing/step"] / beside["timing/step"], 3),
        "after": after,
        "beside": beside,
        **machine(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
