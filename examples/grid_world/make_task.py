"""Make a tokenizer, an untrained 0.43M-parameter model and parquet data for the grid world.

python -m examples.grid_world.make_task --out outputs/grid_world --seed 0
"""

from __future__ import annotations

import random

from examples.data_preprocess.prepare import prepare
from examples.grid_world.teacher import turn
from examples.quickstart.make_task import make_model, make_tokenizer
from examples.task_files import parse_arguments, write_tables

WORDS = ["at ", " goal ", "there is a wall", "up", "down", "left", "right"]


def main() -> None:
    args = parse_arguments(__doc__, "grid_world", seed=0, num_sft=25600, num_rl=2048, num_val=256)
    make_tokenizer(args.out / "model", WORDS)
    make_model(args.out / "model", args.seed)
    rng, data = random.Random(args.seed), args.out / "data"
    write_tables(data, {"sft": [{"messages": turn(rng)} for _ in range(args.num_sft)]})
    prepare(data, "text", {"train": args.num_rl, "val": args.num_val})


if __name__ == "__main__":
    main()
