"""Measure what sampling masks cost: bytes per token, and the time of a step with top-p, with and without them.

    .venv/bin/python scripts/bench/sampling_mask.py --size 3M
    .venv/bin/python scripts/bench/sampling_mask.py --model DIR --dtype bfloat16 --steps 3

Both sides train with main_ppo and the same top_p: with the mask, and with rollout.sampling_mask=False. They alternate.
The learning rate is so small that weights in float32 do not change, so both sides sample and train on the same tokens.
The last line is a JSON object. `ratio` is the median step without the mask over that with it: 0.95 means that the mask
takes 5 % of a step; `phase_ratios` has the same for generation, log-probs and update.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "outputs" / "bench"
sys.path.insert(0, str(ROOT))

from scripts.bench._task import SIZES, count_parameters, machine, make_model, make_prompts, make_reward  # noqa: E402
from scripts.bench._trl import environment  # noqa: E402
from scripts.bench._whole_run import add_sizes, alternate, find_medians, make_keys, train  # noqa: E402

SIDES = {"with": "auto", "without": "False"}  # values of rollout.sampling_mask
PHASES = ("timing/step", "timing/generate", "timing/log_probs", "timing/update")


def time_steps(args: argparse.Namespace, model: Path, side: str) -> list[dict[str, float]]:
    """Run main_ppo and return the metrics of the measured steps. The step after them is recorded."""
    role, last = "actor_rollout_ref", args.warmup + args.steps + 1
    name, prompts = f"sampling_mask_{side}", FOLDER / "prompts.parquet"
    keys = make_keys(args, name, model, prompts, make_reward(FOLDER)) | {
        f"{role}.actor.optim.lr": 1e-12,
        f"{role}.rollout.top_p": args.top_p,
        f"{role}.rollout.sampling_mask": SIDES[side],
        "trainer.controller": "local",
        "trainer.record_steps": f"[{last}]",
        "trainer.total_training_steps": last,
    }
    return [line for line in train(keys, environment(args.threads)) if args.warmup < line["step"] < last]


def count_bytes(step: int) -> dict[str, float]:
    """Bytes of the mask and kept tokens, per sampled token of the recorded step."""
    from alphaapollo.trainer.replay.recording import read_complete_recording
    from alphaapollo.utils.kept_tokens import KEPT_TOKENS, KeptTokens

    folder = ROOT / "outputs" / "bench" / "sampling_mask_with" / "recorded" / f"step_{step:06d}"
    groups = read_complete_recording(folder).inputs.groups
    rows = [row for group in groups for trajectory in group.trajectories for row in trajectory.rows]
    sizes = [len(KeptTokens.decode(row.columns[KEPT_TOKENS]).ids) for row in rows]
    tokens = sum(int(sum(row.action_mask)) for row in rows)
    encoded = sum(len(row.columns[KEPT_TOKENS]) for row in rows)
    return {"bytes_per_token": round(encoded / tokens, 2), "kept_tokens": round(sum(sizes) / tokens, 2)}


def measure(args: argparse.Namespace) -> dict[str, object]:
    model = args.model or FOLDER / args.size
    parameters = count_parameters(model) if args.model else make_model(model, SIZES[args.size])
    make_prompts(FOLDER / "prompts.parquet", args.num_prompts * (args.warmup + args.steps + 1))
    lines = alternate(args.rounds, {side: partial(time_steps, args, model, side) for side in SIDES})
    phases = [name for name in PHASES if name in lines["with"][0]]
    seconds = {side: find_medians(lines[side], phases) for side in SIDES}
    ratios = {name: round(seconds["without"][name] / seconds["with"][name], 3) for name in phases}
    return {
        "benchmark": "sampling_mask",
        "model": str(args.model or args.size),
        "parameters": parameters,
        "dtype": args.dtype,
        "top_p": args.top_p,
        "ratio": ratios["timing/step"],
        "phase_ratios": ratios,
        "seconds": seconds,
        "response_length": {side: round(lines[side][-1]["response_length/mean"], 2) for side in SIDES},
        **count_bytes(args.warmup + args.steps + 1),
        "completions": args.num_prompts * args.group,
        "threads": args.threads,
        **machine(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="3M")
    parser.add_argument("--model", type=Path, help="folder of a model, instead of --size")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--top-p", type=float, default=0.9)
    add_sizes(parser)
    print(json.dumps(measure(parser.parse_args())))


if __name__ == "__main__":
    main()
