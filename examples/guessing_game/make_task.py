"""Make a tokenizer, an untrained 0.43M-parameter model and parquet data for the guessing game.

python -m examples.guessing_game.make_task --out outputs/guessing_game --seed 0
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import pandas as pd

from examples.data_preprocess.prepare import prepare
from examples.guessing_game.teacher import NUMBERS, play
from examples.quickstart.make_task import make_model, make_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/guessing_game"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_sft", type=int, default=12800)
    parser.add_argument("--num_rl", type=int, default=2048)
    parser.add_argument("--num_val", type=int, default=256)
    args = parser.parse_args()
    make_tokenizer(args.out / "model", ["higher", "lower", "up", "down"])
    make_model(args.out / "model", args.seed)
    rng = random.Random(args.seed)
    games = [{"messages": play(rng.randint(1, NUMBERS), rng)} for _ in range(args.num_sft)]
    (args.out / "data").mkdir(parents=True, exist_ok=True)
    pd.DataFrame(games).to_parquet(args.out / "data" / "sft.parquet")
    prepare(args.out / "data", "text", {"train": args.num_rl, "val": args.num_val})


if __name__ == "__main__":
    main()
