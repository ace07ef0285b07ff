"""One whole GRPO iteration (generate, score, update, publish) against TRL 1.16 on the same machine.

    .venv/bin/python scripts/bench/step.py --size 3M
    .venv/bin/python scripts/bench/step.py --size 100M --steps 3

Same random model, prompts, group size, token limit, dtype, optimiser steps and threads. TRL generates with Hugging
Face's generate (its vLLM path does not run on a CPU), in an environment of its own under outputs/bench, made the first
time. Each side gets the micro-batch it is fastest with: a token budget for ours, the best of a few sizes for TRL.
The last line is a JSON object; `ratio` is TRL's median step over ours: above 1, ours is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "outputs" / "bench"
TRL = "trl==1.16.0"
sys.path.insert(0, str(ROOT))

from scripts.bench._task import SIZES, machine, make_model, make_prompts, make_reward  # noqa: E402


def trl_python() -> Path:
    """The Python of an environment with TRL and the torch and transformers that we pin."""
    folder = FOLDER / "trl-venv"
    python, stamp = folder / "bin" / "python", folder / ".installed"
    wanted = TRL + (ROOT / "requirements" / "cpu.txt").read_text()
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"installing {TRL} into {folder}", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        torch = next(line for line in wanted.splitlines() if line.startswith("torch=="))
        install = '. scripts/pip_settings.sh; exec "$0" -m uv pip install --quiet --python "$@"'
        arguments = [sys.executable, str(python), "-c", "requirements/cpu.txt", TRL, torch]
        subprocess.run(["bash", "-c", install, *arguments], cwd=ROOT, check=True)
        stamp.write_text(wanted)
    return python


def environment(threads: int) -> dict[str, str]:
    return os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}


def time_trl(args: argparse.Namespace, model: Path, prompts: Path, micro_batch: int) -> dict[str, Any]:
    """Seconds of each step, and tokens a completion."""
    given = {
        "model": str(model),
        "prompts": str(prompts),
        "num_prompts": args.num_prompts,
        "group": args.group,
        "micro_batch": micro_batch,
        "max_tokens": args.max_tokens,
        "warmup": args.warmup,
        "steps": args.steps,
        "lr": 1e-6,
        "threads": args.threads,
        "dtype": "float32",
        "gradient_checkpointing": False,
    }
    command = [str(trl_python()), str(ROOT / "scripts/bench/_trl_side.py"), json.dumps(given)]
    done = subprocess.run(command, env=environment(args.threads), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"TRL failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1]) | {"micro_batch": micro_batch}


def time_ours(args: argparse.Namespace, model: Path, prompts: Path) -> dict[str, Any]:
    """The same, from the run's own metrics: the real command, with Ray, FSDP2 and vLLM."""
    trajectories = args.num_prompts * args.group
    keys = {
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.model.dtype": "float32",
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        "actor_rollout_ref.actor.optim.lr": 1e-6,
        "actor_rollout_ref.actor.ppo_mini_batch_size": trajectories,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": args.max_token_len,
        "actor_rollout_ref.rollout.max_num_seqs": trajectories,
        "custom_reward_function.path": make_reward(FOLDER),
        "data.train_files": prompts,
        "data.train_batch_size": args.num_prompts,
        "data.max_prompt_length": 256,
        "data.max_response_length": args.max_tokens,
        "env.rollout.n": args.group,
        "trainer.cpu_threads": args.threads,
        "trainer.experiment_name": f"step-{args.size}",
        "trainer.output_dir": ROOT / "outputs",
        "trainer.project_name": "bench",
        "trainer.resume_mode": "disable",
        "trainer.export_hf": False,
        "trainer.save_freq": -1,
        "trainer.test_freq": -1,
        "trainer.total_training_steps": args.warmup + args.steps,
    }
    command = [sys.executable, "-m", "alphaapollo.trainer.main_ppo", *(f"{key}={value}" for key, value in keys.items())]
    done = subprocess.run(command, cwd=ROOT, env=environment(args.threads), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"main_ppo failed:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    lines = (FOLDER / f"step-{args.size}" / "metrics.jsonl").read_text().splitlines()
    steps = [metrics for metrics in map(json.loads, lines) if metrics["step"] > args.warmup]
    names = [name for name in steps[0] if name.startswith("timing/")]
    return {
        "step_seconds": [metrics["timing/step"] for metrics in steps],
        "tokens_per_completion": statistics.mean(metrics["response/length_mean"] for metrics in steps),
        "completions": trajectories,
        "phases": {name: round(statistics.median(metrics[name] for metrics in steps), 4) for name in names},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="3M")
    parser.add_argument("--num-prompts", type=int, help="default: 16, and 4 for the large model")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--warmup", type=int, default=2, help="steps that are not counted")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--max-token-len", type=int, default=4096, help="ours: tokens a micro-batch")
    parser.add_argument(
        "--trl-micro-batches", type=int, nargs="+", default=[128, 32, 16], help="TRL: the best one counts"
    )
    args = parser.parse_args()
    args.num_prompts = args.num_prompts or (16 if args.size == "3M" else 4)
    args.trl_micro_batches = [size for size in args.trl_micro_batches if size <= args.num_prompts * args.group]

    model, prompts = FOLDER / args.size, FOLDER / "prompts.parquet"
    parameters = make_model(model, SIZES[args.size])
    make_prompts(prompts, args.num_prompts * 8)
    ours = time_ours(args, model, prompts)
    trl = min(
        (time_trl(args, model, prompts, size) for size in args.trl_micro_batches),
        key=lambda side: statistics.median(side["step_seconds"]),
    )
    seconds = {name: statistics.median(side["step_seconds"]) for name, side in (("ours", ours), ("trl", trl))}
    print(f"{args.size}: a step takes {seconds['ours']:.2f} s here, {seconds['trl']:.2f} s with TRL", file=sys.stderr)
    result = {
        "benchmark": "step",
        "size": args.size,
        "parameters": parameters,
        "ratio": round(seconds["trl"] / seconds["ours"], 3),
        "ours": ours,
        "trl": trl,
        "threads": args.threads,
        **machine(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
