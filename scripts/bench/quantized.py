"""Compare GRPO with an adapter on weights of 4 bits with the same on weights in bfloat16: speed and memory.

    .venv/bin/python scripts/bench/quantized.py --model DIR

Both sides train with main_ppo and rollout.lora=adapter, and alternate. `alphaapollo quantize` writes the second model.
The last line is a JSON object. `ratio` is the median step in bfloat16 over that with 4 bits (below 1: 4 bits are
slower); `medians` has the seconds of generation and update, tokens/s, and the memory of rank and engine in GiB.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "outputs" / "bench"
sys.path.insert(0, str(ROOT))

from scripts.bench._task import count_parameters, machine, make_prompts, make_reward  # noqa: E402
from scripts.bench._trl import environment  # noqa: E402
from scripts.bench._whole_run import add_sizes, alternate, find_medians, make_keys, train  # noqa: E402

MEASURED = (
    *("timing/step", "timing/generate", "timing/update", "timing/publish", "rollout/tokens_per_second"),
    *("memory/policy_rss_gib", "memory/policy_rss_peak_gib", "memory/engine_gib", "response_length/mean"),
)


def time_steps(args: argparse.Namespace, side: str, model: Path) -> list[dict[str, float]]:
    """Run main_ppo and return the metrics of the measured steps."""
    role = "actor_rollout_ref"
    keys = make_keys(args, f"quantized_{side}", model, FOLDER / "prompts.parquet", make_reward(FOLDER)) | {
        f"{role}.model.lora_rank": args.rank,
        f"{role}.rollout.lora": "adapter",
        "trainer.controller": "local",
    }
    return [line for line in train(keys, environment(args.threads)) if line["step"] > args.warmup]


def measure(args: argparse.Namespace) -> dict[str, object]:
    quantized = FOLDER / f"{args.model.name}_w4_{args.group_size}"
    if not quantized.exists():
        words = ["quantize", str(args.model), str(quantized), "--group-size", str(args.group_size)]
        subprocess.run([sys.executable, "-m", "alphaapollo", *words], cwd=ROOT, check=True)
    make_prompts(FOLDER / "prompts.parquet", args.num_prompts * (args.warmup + args.steps))
    models = {"bfloat16": args.model, "4 bits": quantized}
    lines = alternate(args.rounds, {side: partial(time_steps, args, side, model) for side, model in models.items()})
    medians = {side: find_medians(lines[side], MEASURED) for side in models}
    return {
        "benchmark": "quantized",
        "model": str(args.model),
        "parameters": count_parameters(args.model),
        "group_size": args.group_size,
        "rank": args.rank,
        "ratio": round(medians["bfloat16"]["timing/step"] / medians["4 bits"]["timing/step"], 3),
        "medians": medians,
        "completions": args.num_prompts * args.group,
        "threads": args.threads,
        **machine(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a model in bfloat16")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--group-size", type=int, default=32, help="inputs of a layer that share a scale")
    parser.add_argument("--rank", type=int, default=16)
    add_sizes(parser)
    print(json.dumps(measure(parser.parse_args())))


if __name__ == "__main__":
    main()
