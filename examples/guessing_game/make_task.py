"""Make a tokenizer, an untrained 0.43M-parameter model and parquet data for the guessing game.

python -m examples.guessing_game.make_task --out outputs/guessing_game --seed 0
"""

from __future__ import annotations

import random

from examples.data_preprocess.prepare import prepare
from examples.guessing_game.teacher import NUMBERS, play
from examples.quickstart.make_task import make_model, make_tokenizer
from examples.task_files import parse_arguments, write_tables


def main() -> None:
    args = parse_arguments(__doc__, "guessing_game", seed=0, num_sft=12800, num_rl=2048, num_val=256)
    make_tokenizer(args.out / "model", ["higher", "lower", "up", "down"])
    make_model(args.out / "model", args.seed)
    rng, data = random.Random(args.seed), args.out / "data"
    write_tables(data, {"sft": [{"messages": play(rng.randint(1, NUMBERS), rng)} for _ in range(args.num_sft)]})
    prepare(data, "text", {"train": args.num_rl, "val": args.num_val})


if __name__ == "__main__":
    main()
