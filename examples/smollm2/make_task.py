"""Make the training and the held-out prompts of the example.

python -m examples.smollm2.make_task --out outputs/demo/data
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from examples.smollm2.task import HELD_OUT_TOPICS, TRAIN_TOPICS, make_instructions
from examples.task_files import parse_arguments, write_tables


def make_data(path: Path, count: int, topics: Sequence[str]) -> None:
    """Write a data file with `count` prompts, always the same ones."""
    rows = [
        {
            "data_source": f"smollm2/{one.kind}",
            "prompt": [{"role": "user", "content": one.text}],
            "reward_model": {"style": "rule", "ground_truth": one.as_dict()},
        }
        for one in make_instructions(count, topics, path.stem)
    ]
    write_tables(path.parent, {path.stem: rows})


def main() -> None:
    args = parse_arguments(__doc__, "demo/data", num_train=400, num_val=100)
    make_data(args.out / "train.parquet", args.num_train, TRAIN_TOPICS)
    make_data(args.out / "val.parquet", args.num_val, HELD_OUT_TOPICS)
    print(f"{args.num_train} training and {args.num_val} held-out prompts in {args.out}")


if __name__ == "__main__":
    main()
