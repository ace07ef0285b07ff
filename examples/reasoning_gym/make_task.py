"""Make a tokenizer, an untrained 0.43M-parameter model and parquet data for the example.

python -m examples.reasoning_gym.make_task --out outputs/reasoning_gym --seed 0
"""

from __future__ import annotations

import random

from examples.data_preprocess.prepare import prepare
from examples.quickstart.make_task import make_model, make_tokenizer
from examples.reasoning_gym.teacher import answer, puzzles
from examples.task_files import make_chat_row, parse_arguments, write_tables


def main() -> None:
    args = parse_arguments(__doc__, "reasoning_gym", seed=0, num_sft=32000, num_rl=2048, num_val=256)
    make_tokenizer(args.out / "model")
    make_model(args.out / "model", args.seed)
    rng, data = random.Random(args.seed), args.out / "data"
    chats = [
        make_chat_row(puzzle["question"], answer(puzzle["numbers"], puzzle["operator"], rng))
        for puzzle in puzzles(args.seed, args.num_sft)
    ]
    write_tables(data, {"sft": chats})
    prepare(data, "text", {"train": args.num_rl, "val": args.num_val})


if __name__ == "__main__":
    main()
