"""Make a tokenizer, an untrained 0.43M-parameter model and parquet data for the curriculum example.

python -m examples.curriculum.make_task --out outputs/curriculum --seed 0

Of the 256 training prompts, the warmed-up model can learn from 32: sums with carries. It already solves 128 sums
without a carry, and never solves 96 sums of four digits, which the warm-up lacks. The data source names the kind.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

from examples.quickstart.make_task import make_lessons, make_model, make_prompts, make_tokenizer
from examples.quickstart.task import needs_carry, pairs
from examples.task_files import parse_arguments, write_tables

NUM_LEARNABLE, NUM_SOLVED, NUM_IMPOSSIBLE = 32, 128, 96


def main() -> None:
    args = parse_arguments(__doc__, "curriculum", seed=0, num_sft=38400, num_val=256)
    make_tokenizer(args.out / "model")
    make_model(args.out / "model", args.seed)
    make_data(args.out / "data", args.seed, args.num_sft, args.num_val)


def make_data(folder: Path, seed: int, num_sft: int, num_val: int) -> None:
    """Write sft.parquet (warm-up), train.parquet (three kinds of sums) and val.parquet (held-out sums with carries)."""
    rng = random.Random(seed)
    held_out = sums(random.Random("held out"), with_carry=True, want_held_out=True)  # the same prompts for every seed
    files = {
        "sft": make_lessons(rng, num_sft),
        "train": [
            *make_prompts(itertools.islice(sums(rng, with_carry=True), NUM_LEARNABLE), "train", "sums/carry"),
            *make_prompts(itertools.islice(sums(rng, with_carry=False), NUM_SOLVED), "train", "sums/no_carry"),
            *make_prompts(itertools.islice(long_sums(rng), NUM_IMPOSSIBLE), "train", "sums/four_digits"),
        ],
        "val": make_prompts(itertools.islice(held_out, num_val), "val", "sums/carry"),
    }
    write_tables(folder, files)


def sums(rng: random.Random, with_carry: bool, want_held_out: bool = False) -> Iterator[tuple[int, int]]:
    """Distinct pairs of 3-digit numbers whose sum needs a carry, or needs none."""
    return (pair for pair in pairs(rng, want_held_out) if needs_carry(*pair) is with_carry)


def long_sums(rng: random.Random) -> Iterator[tuple[int, int]]:
    """Pairs of 4-digit numbers."""
    while True:
        yield rng.randint(1000, 9999), rng.randint(1000, 9999)


if __name__ == "__main__":
    main()
