"""Complete runs of main_ppo with Ray, FSDP2 and vLLM, measured by the metrics of the run."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that make_keys reads, and the number of rounds."""
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--max-token-len", type=int, default=4096, help="tokens of a micro-batch")
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))


def make_keys(args: argparse.Namespace, name: str, model: object, prompts: object, reward: object) -> dict[str, object]:
    """Keys of a GRPO run without checkpoints and validations, from the arguments of a benchmark. name: experiment."""
    role, completions = "actor_rollout_ref", args.num_prompts * args.group
    return {
        "algorithm.adv_estimator": "grpo",
        f"{role}.model.path": model,
        f"{role}.model.dtype": args.dtype,
        f"{role}.actor.ppo_mini_batch_size": completions,
        f"{role}.actor.ppo_max_token_len_per_gpu": args.max_token_len,
        f"{role}.rollout.max_num_seqs": completions,
        f"{role}.rollout.cpu_threads": args.threads,
        "custom_reward_function.path": reward,
        "data.train_files": prompts,
        "data.train_batch_size": args.num_prompts,
        "data.max_prompt_length": 256,
        "data.max_response_length": args.max_tokens,
        "env.rollout.n": args.group,
        "trainer.cpu_threads": args.threads,
        "trainer.experiment_name": name,
        "trainer.output_dir": ROOT / "outputs",
        "trainer.project_name": "bench",
        "trainer.resume_mode": "disable",
        "trainer.export_hf": False,
        "trainer.save_freq": -1,
        "trainer.test_freq": -1,
        "trainer.total_training_steps": args.warmup + args.steps,
    }


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


def alternate(
    rounds: int, sides: Mapping[str, Callable[[], list[dict[str, float]]]]
) -> dict[str, list[dict[str, float]]]:
    """Call each side once per round, in alternating order. Returns the lines of metrics that each side has returned."""
    lines: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in [*sides] if number % 2 == 0 else [*reversed(sides)]:
            lines[name] += sides[name]()
            print(f"round {number + 1}, {name}: {lines[name][-1]['timing/step']:.2f} s", flush=True)
    return lines


def find_medians(lines: Sequence[Mapping[str, float]], names: Iterable[str]) -> dict[str, float]:
    """Medians of the metrics `names` over lines."""
    return {name: round(statistics.median(line[name] for line in lines), 4) for name in names}
