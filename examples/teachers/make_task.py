"""Make the student, two teachers and the data of two tasks: additions (examples/quickstart/task.py) and reversals.

    user: 407 reversed?
    assistant: <answer>704</answer>

python -m examples.teachers.make_task --out outputs/teachers --seed 0
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from examples.quickstart.make_task import make_model, make_prompts, make_tokenizer
from examples.quickstart.task import CARRY_RATE, held_out, lesson, pairs, question
from examples.task_files import Row, make_chat_row, make_prompt_row, parse_arguments, write_tables

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


def make_examples(name: str, rng: random.Random) -> list[Row]:
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
        examples.append(make_chat_row(*texts))
    return examples


def make_reversals(numbers: Iterator[str], split: str) -> list[Row]:
    """Return the rows of a data file for reinforcement learning with the reversals of the given numbers."""
    return [
        make_prompt_row(reversal_question(digits), digits[::-1], "teachers/reversal", "text", split, index)
        for index, digits in enumerate(numbers)
    ]


def main() -> None:
    args = parse_arguments(__doc__, "teachers", seed=0)
    for number, name in enumerate(NUM_SFT):
        folder = args.out / name
        make_tokenizer(folder / "model")
        make_model(folder / "model", args.seed + 1000 * number)
        write_tables(folder, {"sft": make_examples(name, random.Random(args.seed + 1000 * number))})
    for split, count in (("train", 1280), ("val", 128)):
        rng = random.Random(args.seed if split == "train" else "held out")
        sums = itertools.islice(pairs(rng, want_held_out=split == "val"), count)
        numbers = itertools.islice(list_digits(rng, want_held_out=split == "val"), count)
        rows = [*make_prompts(sums, split), *make_reversals(numbers, split)]
        write_tables(args.out / "data", {split: rows})
    print(f"three models with one tokenizer, their warm-up examples, and prompts of two tasks in {args.out}")


if __name__ == "__main__":
    main()
