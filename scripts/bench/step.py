"""Compare a complete GRPO iteration (generate, score, update, publish) with TRL 1.16 on the same machine.

    .venv/bin/python scripts/bench/step.py --size 3M
    .venv/bin/python scripts/bench/step.py --size 100M --steps 3
    .venv/bin/python scripts/bench/step.py --size 3M --prompt-tokens 512 --num-prompts 8
    .venv/bin/python scripts/bench/step.py --model DIR --dtype bfloat16   # a pretrained model
    .venv/bin/python scripts/bench/step.py --tail        # some very long answers, and our asynchronous loop

Both sides have the same model, prompts, group size, token limit, dtype and optimizer steps, and alternate. TRL
generates with the same vLLM as our side, in its own process, and once more with Hugging Face's generate. It runs in a
virtual environment under outputs/bench that the first run creates, beside the packages installed here. Its weight sync
is replaced, because it fails with vLLM on a CPU (see _trl_side.py). A short search, which is printed, selects its
micro-batch and threads at that dtype, then tries the other dtype, except bfloat16 on a CPU without instructions for it.
The last line is a JSON object. `ratio` is the median step of TRL with vLLM over ours at the same dtype: above 1, ours
is faster; `ratio_to_its_best_dtype` is the same with the other dtype if TRL is faster with it, else null;
`ratio_to_generate` is that of TRL with generate, with the same settings (null with --only-vllm).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "outputs" / "bench"
sys.path.insert(0, str(ROOT))

from scripts.bench._task import SIZES, count_parameters, machine, make_model, make_prompts, make_reward  # noqa: E402
from scripts.bench._trl import Settings, Task, environment, median, search, time_trl, trl_python  # noqa: E402
from scripts.bench._whole_run import make_keys, train  # noqa: E402

STALENESS = 2
ASYNCHRONOUS = {
    "trainer.async_mode": "separate",
    "trainer.max_staleness": STALENESS,
    "algorithm.rollout_correction.method": "tis",
}


def time_ours(args: argparse.Namespace, task: Task) -> dict[str, Any]:
    """Measure our side from the metrics of a run."""
    trajectories = args.num_prompts * args.group
    threads = max(1, args.threads // 2) if args.tail else args.threads  # engine and trainer at the same time
    role = "actor_rollout_ref"
    keys = make_keys(args, f"step-{args.size}", task.model, task.prompts, make_reward(FOLDER)) | {
        f"{role}.model.enable_gradient_checkpointing": task.gradient_checkpointing,
        f"{role}.actor.optim.lr": task.lr,
        f"{role}.rollout.max_num_seqs": trajectories * (1 + STALENESS if args.tail else 1),
        f"{role}.rollout.cpu_threads": threads,
        "data.max_prompt_length": max(256, args.prompt_tokens or 0),
        "trainer.cpu_threads": threads,
    }
    if args.tail:  # the last iterations of an asynchronous run start no generation, so they are not measured
        keys |= ASYNCHRONOUS | {"trainer.total_training_steps": args.warmup + args.steps + STALENESS + 1}
    lines = train(keys, environment(threads))
    steps = [metrics for metrics in lines if args.warmup < metrics["step"] <= args.warmup + args.steps]
    names = [name for name in steps[0] if name.startswith("timing/")]
    return {
        "step_seconds": [metrics["timing/step"] for metrics in steps],
        "tokens_per_completion": statistics.mean(metrics["response_length/mean"] for metrics in steps),
        "completions": trajectories,
        "phases": {name: round(statistics.median(metrics[name] for metrics in steps), 4) for name in names},
    }


def outside(phases: dict[str, float]) -> float:
    """Share of a step that is neither generation nor update."""
    return round(1 - (phases["timing/generate"] + phases["timing/update"]) / phases["timing/step"], 4)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="3M")
    parser.add_argument("--model", type=Path, help="folder of a model, instead of --size")
    parser.add_argument("--num-prompts", type=int, help="default: 16; 4 for the large model or --tail")
    parser.add_argument("--prompt-tokens", type=int, help="tokens of a rendered prompt; default: 28, the sum alone")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, help="tokens per response; default: 64, with --tail 1024")
    parser.add_argument(
        "--tail", action="store_true", help="geometric lengths (mean about 250), and our loop separate, staleness 2"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="dtype of both sides")
    parser.add_argument("--warmup", type=int, default=2, help="warm-up steps in each round")
    parser.add_argument("--steps", type=int, default=5, help="measured steps in each round")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of both sides")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--max-token-len", type=int, default=4096, help="our tokens per micro-batch")
    parser.add_argument(
        "--trl-micro-batches", type=int, nargs="+", default=[128, 32, 16], help="completions; the best value is used"
    )
    parser.add_argument("--only-vllm", action="store_true", help="not TRL with generate, which takes the longest")
    args = parser.parse_args()
    args.max_tokens = args.max_tokens or (1024 if args.tail else 64)
    args.num_prompts = args.num_prompts or (16 if (args.model or args.size == "3M") and not args.tail else 4)
    args.size = args.model.resolve().name if args.model else args.size
    return args


def main() -> None:
    args = arguments()
    model, prompts = args.model or FOLDER / args.size, FOLDER / "prompts.parquet"
    parameters = count_parameters(model) if args.model else make_model(model, SIZES[args.size])
    make_prompts(prompts, args.num_prompts * 8, tokens=args.prompt_tokens)
    longest = max(256, args.prompt_tokens or 0) + args.max_tokens
    task = Task(str(model), str(prompts), args.num_prompts, args.group, args.max_tokens, longest)
    python = trl_python(FOLDER / "trl-venv")
    sizes = [size for size in args.trl_micro_batches if size <= args.num_prompts * args.group]
    same, best = search(python, task, Settings(args.dtype, sizes[0], args.threads), sizes)
    settings = {"trl": same}
    if best.dtype != same.dtype:
        settings["trl_best_dtype"] = best
    if not args.only_vllm:
        settings["trl_generate"] = replace(same, engine="generate")
    sides: dict[str, list[dict[str, Any]]] = {"ours": [], **{name: [] for name in settings}}
    for _ in range(args.rounds):
        sides["ours"].append(time_ours(args, task))
        for name, one in settings.items():
            sides[name].append(time_trl(python, task, one, args.warmup, args.steps))
    seconds = {name: statistics.median(map(median, runs)) for name, runs in sides.items()}
    ratios = {name: round(one / seconds["ours"], 3) for name, one in seconds.items()}
    print(f"{args.size}: one step takes {seconds['ours']:.2f} s here, {seconds['trl']:.2f} s with TRL", file=sys.stderr)
    result = {
        "benchmark": "step",
        "size": args.size,
        "parameters": parameters,
        "prompt_tokens": args.prompt_tokens,
        "dtype": args.dtype,
        "tail": args.tail,
        "ratio": ratios["trl"],
        "ratio_to_its_best_dtype": ratios.get("trl_best_dtype"),
        "ratio_to_generate": ratios.get("trl_generate"),
        "outside_generation_and_update": statistics.median(outside(run["phases"]) for run in sides["ours"]),
        **sides,
        "threads": args.threads,
        **machine(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
