"""Prepare rows with seeds for environments that write and grade their own prompts (games, generated tasks).

    python -m examples.data_preprocess.prepare --mode text --train_data_size 16 --val_data_size 128

Writes <local_dir>/train.parquet and <local_dir>/val.parquet. Each row has its own env_kwargs.seed, and the two files
share no seed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from alphaapollo.data.files import DataRow
from alphaapollo.utils.seeds import derive_seed
from examples.data_preprocess.common import Count, console, run, show_sample, write_parquet

PLACEHOLDER = "The environment writes this prompt."


def seed_rows(split: str, size: int, mode: str) -> list[DataRow]:
    """`size` rows without question and answer. Row i of a split always has the same seed."""
    name = "test" if split == "val" else split  # the seeds of versions that wrote test.parquet
    return [
        {
            "data_source": mode,
            "prompt": [{"role": "user", "content": PLACEHOLDER}],
            "ability": "agent",
            "extra_info": {"split": split, "index": index},
            "env_kwargs": {"seed": derive_seed("prepare", name, index), "data_source": mode},
        }
        for index in range(size)
    ]


def prepare(folder: Path, mode: str, sizes: dict[str, int]) -> None:
    """Write one file per split.

    Raises:
        ValueError: a size below 1.
    """
    for split, size in sizes.items():
        if size < 1:
            raise ValueError(f"the size of {split} is {size}; it must be at least 1.")
        rows = seed_rows(split, size, mode)
        path = folder / f"{split}.parquet"
        write_parquet(rows, path)
        show_sample(rows)
        console.print(f"{path} (data_source {mode}): {Count(kept=size)}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=["text"], default="text", help="kind of environment")
    parser.add_argument("--train_data_size", type=int, default=256, help="rows of train.parquet")
    parser.add_argument("--val_data_size", type=int, default=256, help="rows of val.parquet")
    parser.add_argument("--local_dir", help="where to write (default: outputs/data/MODE)")
    args = parser.parse_args()
    folder = Path(args.local_dir or Path("outputs/data") / args.mode).expanduser()
    run(lambda: prepare(folder, args.mode, {"train": args.train_data_size, "val": args.val_data_size}))


if __name__ == "__main__":
    main()
