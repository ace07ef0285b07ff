"""Make a tokenizer, an untrained 0.43M-parameter model and parquet data for the quickstart.

python -m examples.quickstart.make_task --out outputs/quickstart --seed 0
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

from examples.chatml import CHAT_TEMPLATE, SPECIAL_TOKENS
from examples.quickstart.task import CARRY_RATE, lesson, needs_carry, pairs, question
from examples.task_files import Row, make_chat_row, make_prompt_row, write_tables

WORDS = ["system", "user", "assistant", "tool", "<think>", "</think>", "<answer>", "</answer>"]
WORDS += ["<python_code>", "</python_code>", "<tool_response>", "</tool_response>", "=?"]

SHAPE = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 384,
    "max_position_embeddings": 512,
}


def make_tokenizer(folder: Path, more_words: Sequence[str] = ()) -> None:
    """Byte-level BPE without merges: 256 bytes, 3 special tokens, 13 words, and `more_words`. Chats use ChatML."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(SPECIAL_TOKENS)
    core.add_tokens([AddedToken(word, normalized=False) for word in (*WORDS, *more_words)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=SPECIAL_TOKENS[0],
        eos_token=SPECIAL_TOKENS[2],
        model_max_length=512,
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.save_pretrained(folder)


def make_model(folder: Path, seed: int, **sizes: int) -> None:
    """Qwen3 with 428,800 random parameters. `sizes` replace values of its configuration."""
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        **SHAPE | sizes,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def make_data(
    folder: Path,
    seed: int,
    num_sft: int,
    num_rl: int,
    num_val: int,
    carry_rate: float = CARRY_RATE,
    wrong_carry_rate: float = 0.0,
    all_sums: bool = False,
) -> None:
    """Write sft.parquet (warm-up examples), train.parquet and val.parquet (questions with the true sum)."""
    rng = random.Random(seed)
    held_out = pairs(random.Random("held out"), want_held_out=True)  # the same prompts for every seed
    tables = {
        "sft": make_lessons(rng, num_sft, carry_rate, wrong_carry_rate, all_sums),
        "train": make_prompts(itertools.islice(pairs(rng, want_held_out=False), num_rl), "train"),
        "val": make_prompts(itertools.islice(held_out, num_val), "val"),
    }
    write_tables(folder, tables)


def make_lessons(
    rng: random.Random,
    count: int,
    carry_rate: float = CARRY_RATE,
    wrong_carry_rate: float = 0.0,
    all_sums: bool = False,
) -> list[Row]:
    """Rows of a data file for the warm-up: chats that add without some of the carries."""
    practised: Iterable[tuple[int, int]] = pairs(rng, want_held_out=False)
    if not all_sums:
        # half of the sums without a carry are left out: lines with a carry would be too rare to learn their digits
        practised = (pair for pair in practised if needs_carry(*pair) or rng.random() < 0.5)
    return [
        make_chat_row(question(a, b), lesson(a, b, rng, carry_rate, wrong_carry_rate))
        for a, b in itertools.islice(practised, count)
    ]


def make_prompts(sums: Iterable[tuple[int, int]], split: str, data_source: str = "quickstart/addition") -> list[Row]:
    """Rows of a data file for reinforcement learning: a question and the true sum."""
    return [
        make_prompt_row(question(a, b), str(a + b), data_source, "arithmetic", split, index)
        for index, (a, b) in enumerate(sums)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/quickstart"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_sft", type=int, default=38400)
    parser.add_argument("--num_rl", type=int, default=4096)
    parser.add_argument("--num_val", type=int, default=256)
    parser.add_argument("--carry_rate", type=float, default=CARRY_RATE, help="share of carries in the warm-up data")
    parser.add_argument(
        "--wrong_carry_rate", type=float, default=0.0, help="share of wrong carries in the warm-up data"
    )
    parser.add_argument("--all_sums", action="store_true", help="warm-up data with all sums without a carry, not half")
    args = parser.parse_args()
    make_tokenizer(args.out / "model")
    make_model(args.out / "model", args.seed)
    counts = (args.num_sft, args.num_rl, args.num_val)
    make_data(args.out / "data", args.seed, *counts, args.carry_rate, args.wrong_carry_rate, args.all_sums)
    print(f"tokenizer and model in {args.out / 'model'}, {args.num_sft} warm-up examples, {args.num_rl} training and "
          f"{args.num_val} held-out prompts in {args.out / 'data'}")  # fmt: skip


if __name__ == "__main__":
    main()
