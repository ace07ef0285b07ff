"""Make the student, two teachers and the data of two tasks: additions (examples/quickstart/task.py) and reversals.

    user: 407 reversed?
    assistant: <answer>704</answer>

python -m examples.teachers.make_task --out outputs/teachers --seed 0
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from examples.quickstart.make_task import make_model, make_prompts, make_tokenizer
from examples.quickstart.task import CARRY_RATE, held_out, lesson, pairs, question

REVERSAL_RATE = 0.5  # share of the student's reversals that are right in its warm-up data; the others are copies
NUM_SFT = {"student": 32000, "adder": 38400, "reverser": 12800}


def reversal_question(digits: str) -> str:
    return f"{digits} reversed?"


def list_digits(rng: random.Random, want_held_out: bool) -> Iterator[str]:
    """Yield numbers with three digits, either all or none held out."""
    while True:
        digits = f"{rng.randrange(1000):03d}"
        if held_out(reversal_question(digits)) is want_held_out:
            yield digits


def make_examples(name: str, rng: random.Random) -> list[dict[str, Any]]:
    """Return the warm-up examples of a model. Teachers learn one task without mistakes, the student both with them."""
    sums, numbers = pairs(rng, want_held_out=False), list_digits(rng, want_held_out=False)
    carry_rate, reversal_rate = (CARRY_RATE, REVERSAL_RATE) if name == "student" else (1.0, 1.0)
    examples = []
    for _ in range(NUM_SFT[name]):
        if name == "adder" or (name == "student" and rng.random() < 0.75):
            a, b = next(sums)
            texts = question(a, b), lesson(a, b, rng, carry_rate)
        else:
            digits = next(numbers)
            answer = digits[::-1] if rng.random() < reversal_rate else digits
            texts = reversal_question(digits), f"<answer>{answer}</answer>"
        roles = ("user", "assistant")
        examples.append(
            {"messages": [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]}
        )
    return examples


def make_reversals(numbers: Iterator[str], split: str) -> list[dict[str, Any]]:
    """Return the rows of a data file for reinforcement learning with the reversals of the given numbers."""
    return [
        {
            "data_source": "teachers/reversal",
            "prompt": [{"role": "user", "content": reversal_question(digits)}],
            "ability": "text",
            "reward_model": {"style": "rule", "ground_truth": digits[::-1]},
            "extra_info": {"split": split, "index": index},
        }
        for index, digits in enumerate(numbers)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/teachers"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for number, name in enumerate(NUM_SFT):
        folder = args.out / name
        make_tokenizer(folder / "model")
        make_model(folder / "model", args.seed + 1000 * number)
        pd.DataFrame(make_examples(name, random.Random(args.seed + 1000 * number))).to_parquet(folder / "sft.parquet")
    (args.out / "data").mkdir(exist_ok=True)
    for split, count in (("train", 1280), ("val", 128)):
        rng = random.Random(args.seed if split == "train" else "held out")
        sums = itertools.islice(pairs(rng, want_held_out=split == "val"), count)
        numbers = itertools.islice(list_digits(rng, want_held_out=split == "val"), count)
        rows = [*make_prompts(sums, split), *make_reversals(numbers, split)]
        pd.DataFrame(rows).to_parquet(args.out / "data" / f"{split}.parquet")
    print(f"three models with one tokenizer, their warm-up examples, and prompts of two tasks in {args.out}")


if __name__ == "__main__":
    main()
