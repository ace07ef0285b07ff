"""Make the task of the symptoms: the quickstart's, preference pairs, and training prompts that are wrong in one way."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

from examples.preferences.make_pairs import rows
from examples.quickstart.make_task import make_data, make_model, make_prompts, make_tokenizer
from examples.quickstart.task import needs_carry, pairs
from examples.task_files import write_tables


def make_task(out: Path, seed: int) -> None:
    """Write OUT/model (tokenizer and untrained model) and OUT/data."""
    make_tokenizer(out / "model")
    make_model(out / "model", seed)
    make_data(out / "data", seed, num_sft=22400, num_rl=1024, num_val=256)
    make_data(out / "data" / "coin", seed, num_sft=4096, num_rl=1, num_val=1, carry_rate=0.5, wrong_carry_rate=0.5)
    rng = random.Random(seed)
    sums = list(islice(pairs(rng, want_held_out=False), 4096))
    tables = {
        "four_digits": make_prompts([(10 * a + b % 10, 10 * b + a % 10) for a, b in sums[:1024]], "train"),
        "four_sums": make_prompts([pair for pair in sums if carries_everywhere(*pair)][:4], "train"),
        "no_carry": make_prompts([pair for pair in sums if not needs_carry(*pair)][:1024], "train"),
        "separators": make_prompts(sums[:1024], "train"),
        "pairs": rows(rng, iter(sums), 1024),
    }
    for row in tables["separators"]:
        row["reward_model"]["ground_truth"] = f"{int(row['reward_model']['ground_truth']):,}"
    write_tables(out / "data", tables)


def carries_everywhere(a: int, b: int) -> bool:
    """Return whether every digit of a sum of two numbers with three digits needs a carry."""
    return all(int(x) + int(y) >= 10 for x, y in zip(str(a), str(b), strict=True))
