"""Make a tokenizer, an untrained 0.43M-parameter model and parquet data for the code task.

python -m examples.code.make_task --out outputs/code --seed 0
"""

from __future__ import annotations

import random
from itertools import islice

from examples.code import task
from examples.quickstart.make_task import make_model, make_tokenizer
from examples.task_files import Row, draw_problems, make_lesson_tables, make_prompt_row, parse_arguments, write_tables

WORDS = ["def f(a): return "]  # one token, because every answer begins with it


def rl_rows(rng: random.Random, split: str, count: int) -> list[Row]:
    return [
        make_prompt_row(problem.question, problem.tests, "code/lists", "code", split, index)
        for index, problem in enumerate(islice(draw_problems(task, rng, split == "val"), count))
    ]


def main() -> None:
    args = parse_arguments(__doc__, "code", seed=0, num_sft=38400, num_rl=1024, num_val=96)
    make_tokenizer(args.out / "model", WORDS)
    make_model(args.out / "model", args.seed)
    write_tables(args.out / "data", make_lesson_tables(task, rl_rows, args))


if __name__ == "__main__":
    main()
