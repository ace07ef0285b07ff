"""Make a tokenizer, a processor, an untrained vision-language model and parquet data with images.

python -m examples.colours.make_task --out outputs/colours --seed 0
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from alphaapollo.types import Message
from examples.colours.model import make_model, make_processor
from examples.colours.task import COLOURS, QUESTION, ask, choose_colour, teach
from examples.task_files import parse_arguments, write_tables


def split_images(column: str, messages: Sequence[Message]) -> dict[str, Any]:
    """Return the columns of a chat with images: its texts, and the images of all messages in order."""
    return {
        column: [{"role": message["role"], "content": message["content"]} for message in messages],
        "images": [encoded_image for message in messages for encoded_image in message.get("images", ())],
    }


def make_row(rng: random.Random, index: int) -> dict[str, Any]:
    """Make a prompt with one image. `env_kwargs`: the colours of both images, for the environment of two turns."""
    first, second = choose_colour(rng), choose_colour(rng)
    return {
        "data_source": "exact/colours",  # the built-in grader `exact` scores an answer
        **split_images("prompt", [ask(first, rng)]),
        "reward_model": {"style": "rule", "ground_truth": first},
        "extra_info": {"index": index},
        "env_kwargs": {"colours": [first, second]},
    }


def make_data(folder: Path, seed: int, num_sft: int, num_rl: int, num_val: int) -> None:
    """Write sft.parquet for the warm-up, train.parquet and val.parquet. val.parquet is the same for every seed."""
    rng, held_out = random.Random(seed), random.Random("held out")
    tables = {
        "sft": [split_images("messages", teach(rng)) for _ in range(num_sft)],
        "train": [make_row(rng, index) for index in range(num_rl)],
        "val": [make_row(held_out, index) for index in range(num_val)],
    }
    write_tables(folder, tables)


def main() -> None:
    args = parse_arguments(__doc__, "colours", seed=0, num_sft=9600, num_rl=1024, num_val=256)
    make_processor(args.out / "model", [*COLOURS, QUESTION])
    make_model(args.out / "model", args.seed)
    make_data(args.out / "data", args.seed, args.num_sft, args.num_rl, args.num_val)


if __name__ == "__main__":
    main()
