"""Make a tokenizer, an untrained 0.43M-parameter model and parquet data for the example.

python -m examples.evolving.make_task --out outputs/evolving --seed 0
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path

from examples.evolving.task import MISSING_CARRIES, check_prompt, write_check
from examples.quickstart.make_task import make_model, make_tokenizer
from examples.quickstart.task import lesson, pairs, question
from examples.task_files import make_chat_row, parse_arguments, write_tables


def make_data(folder: Path, seed: int, num_sft: int, num_problems: int) -> None:
    """Write sft.parquet (solutions and checks alternate) and problems.parquet (held out, the same for every seed)."""
    rng = random.Random(seed)
    chats = []
    for number, (a, b) in enumerate(itertools.islice(pairs(rng, want_held_out=False), num_sft)):
        solution = lesson(a, b, rng, carry_rate=1 - MISSING_CARRIES)
        prompt, reply = question(a, b), solution
        if number % 2:
            prompt, reply = check_prompt(prompt, solution), write_check(solution, rng)
        chats.append(make_chat_row(prompt, reply))
    problems = [
        {
            "data_source": "quickstart/addition",
            "prompt": [{"role": "user", "content": question(a, b)}],
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
        }
        for a, b in itertools.islice(pairs(random.Random("held out"), want_held_out=True), num_problems)
    ]
    write_tables(folder, {"sft": chats, "problems": problems})


def main() -> None:
    args = parse_arguments(__doc__, "evolving", seed=0, num_sft=38400, num_problems=128)
    make_tokenizer(args.out / "model")
    make_model(args.out / "model", args.seed)
    make_data(args.out / "data", args.seed, args.num_sft, args.num_problems)
    print(f"{args.out}: a model, {args.num_sft} training chats, {args.num_problems} problems")


if __name__ == "__main__":
    main()
