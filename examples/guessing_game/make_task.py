"""Make a tokenizer, an untrained 0.43M-parameter model and parquet data for the guessing game.

python -m examples.guessing_game.make_task --out outputs/guessing_game --seed 0

With --tool 1, the model guesses with calls of a tool.
"""

from __future__ import annotations

import random
from pathlib import Path

from examples.agents.make_task import make_agent_tokenizer
from examples.data_preprocess.prepare import prepare
from examples.guessing_game.teacher import CALL, END_OF_CALL, NUMBERS, TOOL, play, play_with_tool
from examples.quickstart.make_task import make_model, make_tokenizer
from examples.task_files import parse_arguments, write_tables


def write_tokenizer(folder: Path, calls_tool: bool) -> None:
    """Write a byte tokenizer; calls_tool: with a chat template that shows the tool `guess` and its calls."""
    words = ["higher", "lower", "up", "down"]
    if calls_tool:
        make_agent_tokenizer(folder, [*words, "found", TOOL, CALL, END_OF_CALL])
    else:
        make_tokenizer(folder, words)


def main() -> None:
    args = parse_arguments(__doc__, "guessing_game", seed=0, num_sft=12800, num_rl=2048, num_val=256, tool=0)
    write_tokenizer(args.out / "model", calls_tool=bool(args.tool))
    make_model(args.out / "model", args.seed)
    rng, data = random.Random(args.seed), args.out / "data"
    teach = play_with_tool if args.tool else play
    write_tables(data, {"sft": [{"messages": teach(rng.randint(1, NUMBERS), rng)} for _ in range(args.num_sft)]})
    prepare(data, "text", {"train": args.num_rl, "val": args.num_val})


if __name__ == "__main__":
    main()
