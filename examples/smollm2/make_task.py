"""Make the training and the held-out prompts of the example.

python -m examples.smollm2.make_task --out outputs/demo/data
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from examples.smollm2.task import HELD_OUT_TOPICS, TRAIN_TOPICS, make_instructions


def make_data(path: Path, count: int, topics: Sequence[str]) -> None:
    """Write a data file with `count` prompts, always the same ones."""
    import pandas as pd

    rows = [
        {
            "data_source": f"smollm2/{one.kind}",
            "prompt": [{"role": "user", "content": one.text}],
            "reward_model": {"style": "rule", "ground_truth": one.as_dict()},
        }
        for one in make_instructions(count, topics, path.stem)
    ]
    pd.DataFrame(rows).to_parquet(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/demo/data"))
    parser.add_argument("--num_train", type=int, default=400)
    parser.add_argument("--num_val", type=int, default=100)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    make_data(args.out / "train.parquet", args.num_train, TRAIN_TOPICS)
    make_data(args.out / "val.parquet", args.num_val, HELD_OUT_TOPICS)
    print(f"{args.num_train} training and {args.num_val} held-out prompts in {args.out}")


if __name__ == "__main__":
    main()
