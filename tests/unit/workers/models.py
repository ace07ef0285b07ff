"""Tiny models for workers: heads that two ranks do not divide, and few parameters for a dense Fisher matrix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from tests.unit.tiny import VOCABULARY, save_tokenizer

SIZES: dict[str, dict[str, Any]] = {
    "three_key_heads": {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3},
    "three_layers": {  # 1,904 parameters
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
    },
}


def save_small_model(name: str, folder: Path) -> Path:
    shape = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "head_dim": 8, "max_position_embeddings": 128}
    config = Qwen3Config(**shape | SIZES[name], tie_word_embeddings=True)
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.data.normal_(std=0.4 if name == "three_layers" else 0.2)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder
