"""Make a tokenizer, an untrained 0.43M-parameter model and parquet data for self-distillation.

python -m examples.self_distillation.make_task --out outputs/self_distillation --seed 0

The task is the quickstart's: additions, whose warm-up data lack three of five carries. Half of the warm-up examples
show a worked answer after the question, and repeat it. The model then mostly omits carries on its own, but follows an
answer that it is shown, with or without carries. `extra_info.demonstration` of each training row has all carries.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path

from examples.quickstart.make_task import make_model, make_prompts, make_tokenizer
from examples.quickstart.task import lesson, needs_carry, pairs, question, scratchpad
from examples.task_files import Row, make_chat_row, parse_arguments, write_tables


def make_warm_up_example(a: int, b: int, rng: random.Random) -> Row:
    answer, asked = lesson(a, b, rng), question(a, b)
    shown = f"{asked}\n{answer}" if rng.random() < 0.5 else asked
    return make_chat_row(shown, answer)


def make_data(folder: Path, seed: int, num_sft: int, num_rl: int, num_val: int) -> None:
    """Write sft.parquet (warm-up examples), train.parquet and val.parquet (questions with the true sum)."""
    rng = random.Random(seed)
    practised = (pair for pair in pairs(rng, want_held_out=False) if needs_carry(*pair) or rng.random() < 0.5)
    tables = {"sft": [make_warm_up_example(a, b, rng) for a, b in itertools.islice(practised, num_sft)]}
    for name, count, source in (
        ("train", num_rl, pairs(rng, want_held_out=False)),
        ("val", num_val, pairs(random.Random("held out"), want_held_out=True)),  # the same prompts for every seed
    ):
        sums = list(itertools.islice(source, count))
        tables[name] = make_prompts(sums, name)
        for row, (a, b) in zip(tables[name], sums, strict=True):
            row["extra_info"]["demonstration"] = scratchpad(a, b, lambda total: total >= 10)
    write_tables(folder, tables)


def main() -> None:
    args = parse_arguments(__doc__, "self_distillation", seed=0, num_sft=57600, num_rl=4096, num_val=256)
    make_tokenizer(args.out / "model")
    make_model(args.out / "model", args.seed)
    make_data(args.out / "data", args.seed, args.num_sft, args.num_rl, args.num_val)


if __name__ == "__main__":
    main()
