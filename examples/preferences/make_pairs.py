"""Make preference pairs of worked sums: a right one, and one with a missing or wrong carry.

python -m examples.preferences.make_pairs --out outputs/preferences --seed 0

Writes data/pairs.parquet, and data/val_pairs.parquet with held-out sums. The data source of a pair is the number of
carries in its sum.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from typing import Any

from examples.quickstart.task import lesson, pairs, question, scratchpad
from examples.task_files import parse_arguments, write_tables

CARRY = re.compile(r"\d\+\d\+1=")
COIN = 0.5  # probability of a carry at each digit of wrong answers


def right(a: int, b: int) -> str:
    return scratchpad(a, b, lambda total: total >= 10)


def wrong(a: int, b: int, rng: random.Random) -> str:
    """A worked sum with random carries that is wrong."""
    texts = (lesson(a, b, rng, carry_rate=COIN, wrong_carry_rate=COIN) for _ in itertools.count())
    return next(text for text in texts if text != right(a, b))


def rows(rng: random.Random, sums: Iterator[tuple[int, int]], count: int) -> list[dict[str, Any]]:
    return [
        {
            "data_source": f"carries_{len(CARRY.findall(right(a, b)))}",
            "prompt": [{"role": "user", "content": question(a, b)}],
            "chosen": [{"role": "assistant", "content": right(a, b)}],
            "rejected": [{"role": "assistant", "content": wrong(a, b, rng)}],
        }
        for a, b in itertools.islice(sums, count)
    ]


def main() -> None:
    args = parse_arguments(__doc__, "preferences", seed=0, num_train=2048, num_val=256)
    rng, fixed = random.Random(args.seed), random.Random("held out")  # fixed: the same for every seed
    train = rows(rng, pairs(rng, want_held_out=False), args.num_train)
    val = rows(fixed, pairs(fixed, want_held_out=True), args.num_val)
    write_tables(args.out / "data", {"pairs": train, "val_pairs": val})


if __name__ == "__main__":
    main()
