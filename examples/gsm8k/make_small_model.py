"""Make a small untrained Qwen3 with a tokenizer trained on GSM8K's text, for use without a pretrained model.

python -m examples.gsm8k.make_small_model --text gsm8k_train.jsonl --out outputs/gsm8k/model
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from examples.chatml import CHAT_TEMPLATE, SPECIAL_TOKENS


def texts(file: Path) -> Iterator[str]:
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            yield row["question"]
            yield row["answer"]


def make_tokenizer(file: Path, folder: Path, vocab_size: int) -> None:
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from tokenizers.trainers import BpeTrainer
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    core.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    core.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts(file), trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=SPECIAL_TOKENS[0], eos_token=SPECIAL_TOKENS[2], chat_template=CHAT_TEMPLATE
    ).save_pretrained(folder)


def make_model(folder: Path, hidden_size: int, num_layers: int, seed: int) -> None:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=hidden_size // 64,
        head_dim=32,
        intermediate_size=hidden_size * 3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens in {folder}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="jsonl with question and answer")
    parser.add_argument("--out", type=Path, default=Path("outputs/gsm8k/model"))
    parser.add_argument("--vocab_size", type=int, default=4096)
    parser.add_argument("--hidden_size", type=int, default=256)
    parser.add_argument("--num_layers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    make_tokenizer(args.text, args.out, args.vocab_size)
    make_model(args.out, args.hidden_size, args.num_layers, args.seed)


if __name__ == "__main__":
    main()
