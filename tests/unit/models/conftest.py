"""Tiny models of each architecture that the tests hold to, saved as Hugging Face folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

VOCABULARY = 48


def _config(name: str):
    from transformers import Gemma2Config, GraniteConfig, LlamaConfig, Qwen3Config, Qwen3MoeConfig

    shape = dict(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    match name:
        case "qwen3":
            return Qwen3Config(**shape, head_dim=8, tie_word_embeddings=True)
        case "llama":
            return LlamaConfig(**shape, tie_word_embeddings=False)
        case "qwen3_moe":
            return Qwen3MoeConfig(
                **shape, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, decoder_sparse_step=1
            )
        case "gemma2":  # caps scores and logits, and every other layer sees a window
            return Gemma2Config(**shape, head_dim=8, sliding_window=4, final_logit_softcapping=0.5, attn_logit_softcapping=2.0)
        case "granite":
            return GraniteConfig(**shape, logits_scaling=3.0)
    raise AssertionError(name)


def build_model(name: str) -> torch.nn.Module:
    """Weights large enough that attention and logits are far from uniform."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(_config(name), dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.data.normal_(std=0.2)
    return model.eval()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """name -> folder with config, weights and a tokenizer."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            build_model(name).save_pretrained(made[name])
            save_tokenizer(made[name])
        return made[name]

    return folder


def save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
