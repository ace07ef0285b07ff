"""Make a tokenizer, a processor, an untrained vision-language model and parquet data with images.

python -m examples.colours.make_task --out outputs/colours --seed 0
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from alphaapollo.types import Message
from examples.colours.model import make_model, make_processor
from examples.colours.task import COLOURS, QUESTION, ask, choose_colour, teach


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
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    lessons = (split_images("messages", teach(rng)) for _ in range(num_sft))
    pd.DataFrame(lessons).to_parquet(folder / "sft.parquet")
    for split, source, count in (("train", rng, num_rl), ("val", random.Random("held out"), num_val)):
        pd.DataFrame(make_row(source, index) for index in range(count)).to_parquet(folder / f"{split}.parquet")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/colours"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_sft", type=int, default=9600)
    parser.add_argument("--num_rl", type=int, default=1024)
    parser.add_argument("--num_val", type=int, default=256)
    args = parser.parse_args()
    make_processor(args.out / "model", [*COLOURS, QUESTION])
    make_model(args.out / "model", args.seed)
    make_data(args.out / "data", args.seed, args.num_sft, args.num_rl, args.num_val)


if __name__ == "__main__":
    main()
