"""Make a tokenizer, an untrained 0.43M-parameter model and parquet data for the calculator task.

python -m examples.informal_math.make_task --out outputs/informal_math --seed 0
"""

from __future__ import annotations

import random
from itertools import islice

from examples.informal_math import task
from examples.quickstart.make_task import make_model, make_tokenizer
from examples.task_files import Row, draw_problems, make_lesson_tables, make_prompt_row, parse_arguments, write_tables

WORDS = ['{"status": "ok", "text": "', '"}', "\\boxed{"]  # one token each, because they are only copied


def rl_rows(rng: random.Random, split: str, count: int) -> list[Row]:
    rows = []
    for index, problem in enumerate(islice(draw_problems(task, rng, split == "val"), count)):
        source, truth = "informal_math/calculator", str(problem.truth)
        row = make_prompt_row(problem.question, truth, source, "arithmetic", split, index)
        rows.append(row | {"env_kwargs": {"question": problem.question}})
    return rows


def main() -> None:
    args = parse_arguments(__doc__, "informal_math", seed=0, num_sft=57600, num_rl=4096, num_val=200)
    make_tokenizer(args.out / "model", WORDS)
    make_model(args.out / "model", args.seed)
    write_tables(args.out / "data", make_lesson_tables(task, rl_rows, args))


if __name__ == "__main__":
    main()
