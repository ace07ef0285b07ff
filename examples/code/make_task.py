"""Make a tokenizer, an untrained 0.43M-parameter model and parquet data for the code task.

python -m examples.code.make_task --out outputs/code --seed 0
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from examples.code.task import Problem, draw, held_out, lesson
from examples.quickstart.make_task import make_model, make_tokenizer

WORDS = ["def f(a): return "]  # one token, because every answer begins with it


def problems(rng: random.Random, want_held_out: bool) -> Iterator[Problem]:
    return (problem for problem in iter(lambda: draw(rng), None) if held_out(problem.question) == want_held_out)


def rl_rows(rng: random.Random, split: str, count: int) -> list[dict[str, object]]:
    return [
        {
            "data_source": "code/lists",
            "prompt": [{"role": "user", "content": problem.question}],
            "ability": "code",
            "reward_model": {"style": "rule", "ground_truth": problem.tests},
            "extra_info": {"split": split, "index": index},
        }
        for index, problem in enumerate(itertools.islice(problems(rng, split == "val"), count))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/code"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_sft", type=int, default=38400)
    parser.add_argument("--num_rl", type=int, default=1024)
    parser.add_argument("--num_val", type=int, default=96)
    args = parser.parse_args()
    make_tokenizer(args.out / "model", WORDS)
    make_model(args.out / "model", args.seed)
    rng, data = random.Random(args.seed), args.out / "data"
    data.mkdir(parents=True, exist_ok=True)
    taught = itertools.islice(problems(rng, want_held_out=False), args.num_sft)
    pd.DataFrame([{"messages": lesson(problem, rng)} for problem in taught]).to_parquet(data / "sft.parquet")
    pd.DataFrame(rl_rows(rng, "train", args.num_rl)).to_parquet(data / "train.parquet")
    pd.DataFrame(rl_rows(random.Random("held out"), "val", args.num_val)).to_parquet(data / "val.parquet")


if __name__ == "__main__":
    main()
