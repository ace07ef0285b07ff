"""Make a tokenizer, an untrained 0.43M-parameter model and parquet data for the example.

python -m examples.reasoning_gym.make_task --out outputs/reasoning_gym --seed 0
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import pandas as pd

from examples.data_preprocess.prepare import prepare
from examples.quickstart.make_task import make_model, make_tokenizer
from examples.reasoning_gym.teacher import answer, puzzles


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/reasoning_gym"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_sft", type=int, default=32000)
    parser.add_argument("--num_rl", type=int, default=2048)
    parser.add_argument("--num_val", type=int, default=256)
    args = parser.parse_args()
    make_tokenizer(args.out / "model")
    make_model(args.out / "model", args.seed)
    rng = random.Random(args.seed)
    chats = [
        [
            {"role": "user", "content": puzzle["question"]},
            {"role": "assistant", "content": answer(puzzle["numbers"], puzzle["operator"], rng)},
        ]
        for puzzle in puzzles(args.seed, args.num_sft)
    ]
    (args.out / "data").mkdir(parents=True, exist_ok=True)
    pd.DataFrame({"messages": chats}).to_parquet(args.out / "data" / "sft.parquet")
    prepare(args.out / "data", "text", {"train": args.num_rl, "val": args.num_val})


if __name__ == "__main__":
    main()
