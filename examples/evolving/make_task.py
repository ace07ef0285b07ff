"""Make a tokenizer, an untrained 0.43M-parameter model and parquet data for the example.

python -m examples.evolving.make_task --out outputs/evolving --seed 0
"""

from __future__ import annotations

import argparse
import itertools
import random
from pathlib import Path

import pandas as pd

from examples.evolving.task import MISSING_CARRIES, check_prompt, write_check
from examples.quickstart.make_task import make_model, make_tokenizer
from examples.quickstart.task import lesson, pairs, question


def make_data(folder: Path, seed: int, num_sft: int, num_problems: int) -> None:
    """Write sft.parquet (solutions and checks alternate) and problems.parquet (held out, the same for every seed)."""
    rng = random.Random(seed)
    chats = []
    for number, (a, b) in enumerate(itertools.islice(pairs(rng, want_held_out=False), num_sft)):
        solution = lesson(a, b, rng, carry_rate=1 - MISSING_CARRIES)
        prompt, reply = question(a, b), solution
        if number % 2:
            prompt, reply = check_prompt(prompt, solution), write_check(solution, rng)
        chats.append([{"role": "user", "content": prompt}, {"role": "assistant", "content": reply}])
    problems = [
        {
            "data_source": "quickstart/addition",
            "prompt": [{"role": "user", "content": question(a, b)}],
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
        }
        for a, b in itertools.islice(pairs(random.Random("held out"), want_held_out=True), num_problems)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    pd.DataFrame({"messages": chats}).to_parquet(folder / "sft.parquet")
    pd.DataFrame(problems).to_parquet(folder / "problems.parquet")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/evolving"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_sft", type=int, default=38400)
    parser.add_argument("--num_problems", type=int, default=128)
    args = parser.parse_args()
    make_tokenizer(args.out / "model")
    make_model(args.out / "model", args.seed)
    make_data(args.out / "data", args.seed, args.num_sft, args.num_problems)
    print(f"{args.out}: a model, {args.num_sft} training chats, {args.num_problems} problems")


if __name__ == "__main__":
    main()
