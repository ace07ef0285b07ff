"""Make a tokenizer, an untrained 0.43M-parameter model and parquet data for the grid world.

python -m examples.grid_world.make_task --out outputs/grid_world --seed 0
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import pandas as pd

from examples.data_preprocess.prepare import prepare
from examples.grid_world.teacher import turn
from examples.quickstart.make_task import make_model, make_tokenizer

WORDS = ["at ", " goal ", "there is a wall", "up", "down", "left", "right"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/grid_world"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_sft", type=int, default=25600)
    parser.add_argument("--num_rl", type=int, default=2048)
    parser.add_argument("--num_val", type=int, default=256)
    args = parser.parse_args()
    make_tokenizer(args.out / "model", WORDS)
    make_model(args.out / "model", args.seed)
    rng = random.Random(args.seed)
    turns = [{"messages": turn(rng)} for _ in range(args.num_sft)]
    (args.out / "data").mkdir(parents=True, exist_ok=True)
    pd.DataFrame(turns).to_parquet(args.out / "data" / "sft.parquet")
    prepare(args.out / "data", "text", {"train": args.num_rl, "val": args.num_val})


if __name__ == "__main__":
    main()
