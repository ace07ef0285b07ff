"""Make rows of increasing difficulty for env.env_name=reasoning_gym: a curriculum with data.shuffle=false.

python -m examples.reasoning_gym.make_curriculum --tasks chain_sum gcd --levels 0 1 2 --rows_a_level 512
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from alphaapollo.config.schema import Env
from alphaapollo.environments import check_environment
from alphaapollo.utils.seeds import derive_seed
from examples.data_preprocess.common import run
from examples.data_preprocess.prepare import PLACEHOLDER


def rows(tasks: Sequence[str], levels: Sequence[int], rows_a_level: int) -> Iterator[dict[str, Any]]:
    """Rows sorted by level. The tasks of a level alternate.

    Raises:
        ValueError: reasoning-gym lacks a task or cannot make it at a level.
    """
    for level in levels:
        check_environment(Env(env_name="reasoning_gym", reasoning_gym={"tasks": list(tasks), "level": level}))
        for place in range(rows_a_level):
            task = tasks[place % len(tasks)]
            yield {
                "data_source": f"reasoning_gym/{task}",
                "prompt": [{"role": "user", "content": PLACEHOLDER}],
                "env_kwargs": {"task": task, "level": level, "seed": derive_seed("curriculum", task, level, place)},
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", required=True)
    parser.add_argument("--levels", nargs="+", type=int, default=[0, 1, 2, 3])
    parser.add_argument("--rows_a_level", type=int, default=512)
    parser.add_argument("--out", type=Path, default=Path("outputs/reasoning_gym/data/curriculum.parquet"))
    args = parser.parse_args()

    def write() -> None:
        made = pd.DataFrame(rows(args.tasks, args.levels, args.rows_a_level))
        args.out.parent.mkdir(parents=True, exist_ok=True)
        made.to_parquet(args.out)
        print(f"{len(made)} rows of {', '.join(args.tasks)} at the levels {args.levels} in {args.out}")

    run(write)


if __name__ == "__main__":
    main()
