"""Make a tokenizer, an untrained 0.43M-parameter model and parquet data for the calculator task.

python -m examples.informal_math.make_task --out outputs/informal_math --seed 0
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from examples.informal_math.task import Problem, draw, held_out, lesson
from examples.quickstart.make_task import make_model, make_tokenizer

WORDS = ['{"status": "ok", "text": "', '"}', "\\boxed{"]  # one token each, because they are only copied


def problems(rng: random.Random, want_held_out: bool) -> Iterator[Problem]:
    return (problem for problem in iter(lambda: draw(rng), None) if held_out(problem.question) == want_held_out)


def rl_rows(rng: random.Random, split: str, count: int) -> list[dict[str, object]]:
    return [
        {
            "data_source": "informal_math/calculator",
            "prompt": [{"role": "user", "content": problem.question}],
            "ability": "arithmetic",
            "reward_model": {"style": "rule", "ground_truth": str(problem.truth)},
            "extra_info": {"split": split, "index": index},
            "env_kwargs": {"question": problem.question},
        }
        for index, problem in enumerate(itertools.islice(problems(rng, split == "val"), count))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/informal_math"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_sft", type=int, default=57600)
    parser.add_argument("--num_rl", type=int, default=4096)
    parser.add_argument("--num_val", type=int, default=200)
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
