"""Inputs of the benchmarks: a random Qwen3 of a given size with a byte tokenizer, and questions in parquet."""

from __future__ import annotations

import os
import platform
import random
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase

import pandas as pd

from examples.chatml import CHAT_TEMPLATE, SPECIAL_TOKENS


@dataclass(frozen=True)
class Size:
    """Shape of a model. Heads are 64 wide (32 in the small model); there are half as many key-value heads."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    head_dim: int


SIZES = {
    "3M": Size(vocab_size=272, hidden_size=256, num_layers=4, head_dim=32),
    "100M": Size(vocab_size=32_000, hidden_size=768, num_layers=11, head_dim=64),
}


INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")  # the fastest first
SHORTEST = 28  # tokens of a rendered prompt: "user\n", "123+456=?", "\nassistant\n", and the turn markers


def make_model(folder: Path, size: Size, seed: int = 0) -> int:
    """Write model and tokenizer to `folder` and return the number of parameters. Unused tokens pad the vocabulary."""
    import torch
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = letters + [f"<{index}>" for index in range(size.vocab_size - len(letters) - len(SPECIAL_TOKENS))]
    core = Tokenizer(BPE(vocab={name: index for index, name in enumerate(names)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(SPECIAL_TOKENS)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=SPECIAL_TOKENS[0], eos_token=SPECIAL_TOKENS[2], chat_template=CHAT_TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=size.vocab_size,
        hidden_size=size.hidden_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.hidden_size // size.head_dim,
        num_key_value_heads=size.hidden_size // size.head_dim // 2,
        head_dim=size.head_dim,
        intermediate_size=3 * size.hidden_size,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    return model.num_parameters()


def count_parameters(folder: Path) -> int:
    """Count the parameters of a model folder, tied ones once."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return model.num_parameters()


def make_prompts(file: Path, count: int, seed: int = 0, tokens: int | None = None) -> None:
    """Write sums of two 3-digit numbers as chats, in the columns that main_ppo reads.

    tokens: length of a rendered prompt, filled with letters before the sum (one token per byte). None: the sum alone.
    """
    rng = random.Random(seed)
    sums = [(rng.randrange(100, 1000), rng.randrange(100, 1000)) for _ in range(count)]
    if tokens is not None and tokens < SHORTEST:
        raise SystemExit(
            f"--prompt-tokens={tokens} is too small: a prompt has at least {SHORTEST} tokens. Increase it or omit it."
        )
    filler = [rng.choices(ascii_lowercase, k=(tokens or SHORTEST) - SHORTEST) for _ in sums]
    rows = [
        {
            "data_source": "bench/sums",
            "prompt": [{"role": "user", "content": f"{''.join(letters)}{a}+{b}=?"}],
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
        }
        for letters, (a, b) in zip(filler, sums, strict=True)
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_parquet(file)


def make_reward(folder: Path) -> Path:
    """Write a reward function of negligible cost."""
    file = folder / "reward.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("def compute_score(prompt, completion):\n    return sum(map(str.isdigit, completion)) / 10\n")
    return file


def machine() -> dict[str, object]:
    """Processor with its widest instructions, cores, and load average of this machine."""
    lines = [line.partition(":")[::2] for line in Path("/proc/cpuinfo").read_text().splitlines()]
    found = {name.strip(): value.strip() for name, value in lines}
    widest = next((name for name in INSTRUCTIONS if name in found.get("flags", "").split()), "without avx2")
    name = found.get("model name", platform.machine())
    return {"machine": f"{name} ({widest}), {os.cpu_count()} cores", "load_average": round(os.getloadavg()[0], 2)}
