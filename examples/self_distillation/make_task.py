"""Make a tokenizer, an untrained 0.43M-parameter model and parquet data for self-distillation.

python -m examples.self_distillation.make_task --out outputs/self_distillation --seed 0

The task is the quickstart's: additions, whose warm-up data lack three of five carries. Half of the warm-up examples
show a worked answer after the question, and repeat it. The model then mostly omits carries on its own, but follows an
answer that it is shown, with or without carries. `extra_info.demonstration` of each training row has all carries.
"""

from __future__ import annotations

import argparse
import itertools
import random
from pathlib import Path

import pandas as pd

from examples.quickstart.make_task import make_model, make_prompts, make_tokenizer
from examples.quickstart.task import lesson, needs_carry, pairs, question, scratchpad


def make_warm_up_example(a: int, b: int, rng: random.Random) -> dict[str, list[dict[str, str]]]:
    answer, asked = lesson(a, b, rng), question(a, b)
    shown = f"{asked}\n{answer}" if rng.random() < 0.5 else asked
    return {"messages": [{"role": "user", "content": shown}, {"role": "assistant", "content": answer}]}


def make_data(folder: Path, seed: int, num_sft: int, num_rl: int, num_val: int) -> None:
    """Write sft.parquet (warm-up examples), train.parquet and val.parquet (questions with the true sum)."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    practised = (pair for pair in pairs(rng, want_held_out=False) if needs_carry(*pair) or rng.random() < 0.5)
    sft = [make_warm_up_example(a, b, rng) for a, b in itertools.islice(practised, num_sft)]
    pd.DataFrame(sft).to_parquet(folder / "sft.parquet")
    for name, count, source in (
        ("train", num_rl, pairs(rng, want_held_out=False)),
        ("val", num_val, pairs(random.Random("held out"), want_held_out=True)),  # the same prompts for every seed
    ):
        sums = list(itertools.islice(source, count))
        rows = make_prompts(sums, name)
        for row, (a, b) in zip(rows, sums, strict=True):
            row["extra_info"]["demonstration"] = scratchpad(a, b, lambda total: total >= 10)
        pd.DataFrame(rows).to_parquet(folder / f"{name}.parquet")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/self_distillation"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_sft", type=int, default=57600)
    parser.add_argument("--num_rl", type=int, default=4096)
    parser.add_argument("--num_val", type=int, default=256)
    args = parser.parse_args()
    make_tokenizer(args.out / "model")
    make_model(args.out / "model", args.seed)
    make_data(args.out / "data", args.seed, args.num_sft, args.num_rl, args.num_val)


if __name__ == "__main__":
    main()
