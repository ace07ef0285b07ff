"""Compare the asynchronous modes with the synchronous loop on the real engine, in complete runs of main_ppo.

    .venv/bin/python scripts/bench/async_engine.py

A random model ends its text with equal probability at each token, so lengths are geometric: about 270, cut at 1,024.
Seconds are means over the middle iterations: the first ones warm up, and the last ones start no new generation. The
last line is a JSON object; `ratio` is the seconds of the synchronous loop over those of carry.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.bench._task import machine  # noqa: E402
from scripts.bench._whole_run import begin, means, run  # noqa: E402

FOLDER = ROOT / "outputs" / "bench" / "async_engine"
FIGURES = ("timing/step", "timing/generate", "timing/update", "staleness/mean", "staleness/max", "mismatch/k3")
WARM_UP = 2  # iterations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8, help="prompts per iteration")
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--staleness", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=12)
    args = parser.parse_args()
    begin(FOLDER, "3M")
    modes = {"synchronous": ()} | {
        mode: (f"trainer.async_mode={mode}", f"trainer.max_staleness={args.staleness}")
        for mode in ("carry", "separate")
    }
    figures = {}
    for name, overrides in modes.items():
        lines = run(FOLDER, name, args, "algorithm.rollout_correction.method=tis", *overrides)
        middle = [line for line in lines if WARM_UP < line["step"] <= args.iterations - args.staleness - 1]
        figures[name] = {key: float(f"{mean:.4g}") for key, mean in means(middle, FIGURES).items()}
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
