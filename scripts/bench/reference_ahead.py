"""Compare reference log-probs computed during generation with those computed after it, in runs of main_ppo.

    .venv/bin/python scripts/bench/reference_ahead.py

A random model ends its text with equal probability at each token, so lengths are geometric, and the engine is mostly
idle during the last responses of an iteration. Both sides have the same samples and alternate; seconds are means over
all iterations except the first two. The last line is a JSON object; `ratio` is the seconds of a step with log-probs
after generation over those with log-probs during generation.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.bench._task import SIZES, machine  # noqa: E402
from scripts.bench._whole_run import begin, means, run  # noqa: E402

FOLDER = ROOT / "outputs" / "bench" / "reference_ahead"
FIGURES = ("timing/step", "timing/generate", "timing/columns", "timing/update", "perf/reference_ahead")
WARM_UP = 2  # iterations


def run_one(ahead: bool, args: argparse.Namespace) -> dict[str, float]:
    """Means of the metrics over the iterations of one run."""
    keys = ("actor_rollout_ref.actor.use_kl_loss=true", f"actor_rollout_ref.ref.log_probs_ahead={ahead}")
    lines = run(FOLDER, name_of(ahead), args, *keys)
    return means([line for line in lines if line["step"] > WARM_UP], FIGURES)


def name_of(ahead: bool) -> str:
    return "beside" if ahead else "after"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="3M")
    parser.add_argument("--prompts", type=int, default=16, help="prompts per iteration")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.iterations <= WARM_UP:
        parser.error(f"--iterations {args.iterations} must be larger than {WARM_UP}, the number of warm-up iterations.")
    begin(FOLDER, args.size)
    found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for _ in range(args.rounds):
        for ahead, own in found.items():
            own.append(run_one(ahead, args))
            print(f"{name_of(ahead)}: {own[-1]}", file=sys.stderr, flush=True)
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
