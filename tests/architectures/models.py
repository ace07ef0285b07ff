"""Tiny random models of many architectures, with sliding windows and RoPE limits that are shorter than the test's rows.

scripts/models_page.py prints a table row for each of them. tests/unit/models/test_architectures.py
measures the columns that need no engine, tests/architectures/engine.py measures the engine column.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

WINDOW, ORIGINAL_CONTEXT = 16, 32  # tokens; rows are longer
MAX_LENGTH = 100  # of the rows of a run
VOCABULARY = 64
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED_EXPERT = EXPERTS | {"shared_expert_intermediate_size": 32}
DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
QWEN4 = {
    "hc_lowrank": 16,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 32,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}
DEEPSEEK = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "topk_method": "noaux_tc",  # read by vLLM only
    "scoring_func": "sigmoid",
    "q_lora_rank": 16,
    "kv_lora_rank": 512,  # vLLM's CPU kernel has only the sizes of DeepSeek-V3: 512 + 64
    "qk_rope_head_dim": 64,
    "head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "num_key_value_heads": 4,
}
SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
SHORT, LONG = [1.0 + 0.1 * i for i in range(16)], [2.0 + 0.3 * i for i in range(16)]


def rope(kind: str, **keys: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **keys}}


def limited(kind: str, original: int = ORIGINAL_CONTEXT, **keys: Any) -> dict[str, Any]:
    """RoPE with an original context shorter than that of the model."""
    return rope(kind, original_max_position_embeddings=original, **keys)


def longrope(original: int, short: list[float] = SHORT, long: list[float] = LONG, **keys: Any) -> dict[str, Any]:
    settings = limited("longrope", original, short_factor=short, long_factor=long, **keys)
    return settings | {"original_max_position_embeddings": original}


LLAMA3 = limited("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)

GPT_OSS_YARN = limited("yarn", factor=4.0, beta_fast=32.0, beta_slow=1.0, truncate=False)
DELTA_NET_ENGINE = {"enable_prefix_caching": False, "dtype": "bfloat16"}  # what vLLM's CPU kernels support


@dataclass(frozen=True, eq=False)
class Architecture:
    """Tiny model of a family. `family` is transformers' model_type."""

    family: str
    variant: str = ""  # distinguishes models of one family
    settings: dict[str, Any] = field(default_factory=dict)
    rollout: dict[str, Any] = field(default_factory=dict)  # settings of the engine
    same_as: dict[str, Any] | None = None  # settings with which transformers computes what training and vLLM compute

    @property
    def dtype(self) -> str:
        """Dtype of the engine."""
        return self.rollout.get("dtype", "float32")

    @property
    def name(self) -> str:
        return f"{self.family}, {self.variant}" if self.variant else self.family

    def build_config(self, settings: dict[str, Any] | None = None) -> Any:
        from transformers import AutoConfig

        return AutoConfig.for_model(self.family, **SHAPE | self.settings | (settings or {}))

    def build_model(self, settings: dict[str, Any] | None = None) -> Any:
        """Build the model with weights large enough that attention and logits are far from uniform."""
        from transformers import AutoModelForCausalLM

        torch.manual_seed(7)
        config = self.build_config(settings)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.data.normal_(std=0.2)
        return model.eval()

    def save(self, folder: Path) -> Path:
        self.build_model().save_pretrained(folder)
        return folder


ARCHITECTURES = [
    Architecture("qwen2"),
    Architecture("qwen2", "sliding window in one layer", QWEN_WINDOW),
    Architecture("qwen2_moe", "sliding window in one layer", SHARED_EXPERT | QWEN_WINDOW),
    Architecture("qwen3"),
    Architecture("qwen3", "sliding window in one layer", QWEN_WINDOW),
    Architecture("qwen3_moe", "", EXPERTS),
    Architecture("qwen3_moe", "sliding window", EXPERTS | QWEN_WINDOW),
    Architecture("qwen3_next", "", DELTA_NET | SHARED_EXPERT, rollout=DELTA_NET_ENGINE),
    Architecture("qwen3_5_text", "", DELTA_NET, rollout=DELTA_NET_ENGINE),
    Architecture("qwen4_exp_text", "", DELTA_NET | SHARED_EXPERT | QWEN4),
    Architecture("llama"),
    Architecture("llama", "linear RoPE", rope("linear", factor=2.0)),
    Architecture("llama", "dynamic RoPE", rope("dynamic", factor=4.0)),
    Architecture(
        "llama",
        "dynamic RoPE, rows above the context length",
        rope("dynamic", factor=4.0) | {"max_position_embeddings": ORIGINAL_CONTEXT},
    ),
    Architecture("llama", "YaRN", limited("yarn", factor=4.0)),
    Architecture("llama", "longrope", longrope(ORIGINAL_CONTEXT), same_as=longrope(ORIGINAL_CONTEXT, LONG, LONG)),
    Architecture("llama", "llama3 RoPE", LLAMA3),
    Architecture("mistral", "sliding window", {"sliding_window": WINDOW}),
    Architecture("gemma2", "", {"sliding_window": WINDOW}),
    Architecture("gemma3_text", "", SLIDING),
    Architecture("phi3", "sliding window", {"sliding_window": WINDOW}),
    Architecture(
        "phi3", "longrope, long factors", longrope(ORIGINAL_CONTEXT), same_as=longrope(ORIGINAL_CONTEXT, LONG, LONG)
    ),
    Architecture("phi3", "longrope, short factors", longrope(100)),
    Architecture(
        "phimoe",
        "longrope",
        longrope(ORIGINAL_CONTEXT, short_mscale=1.2, long_mscale=1.4) | {"num_local_experts": 4},
        same_as=longrope(ORIGINAL_CONTEXT, LONG, LONG, short_mscale=1.4, long_mscale=1.4),
    ),
    Architecture("phimoe", "sliding window", {"sliding_window": WINDOW, "num_local_experts": 4}),
    Architecture("olmo2"),
    Architecture("granite", "", {"logits_scaling": 3.0}),
    Architecture("opt", "", {"ffn_dim": 96, "word_embed_proj_dim": 128, "dropout": 0.3}),
    Architecture("gpt_oss", "", SLIDING | GPT_OSS_YARN | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    Architecture("deepseek_v3", "", DEEPSEEK),
    Architecture("deepseek_v3", "YaRN", DEEPSEEK | limited("yarn", factor=4.0, mscale=1.0, mscale_all_dim=1.0)),
    Architecture("glm4"),
    Architecture("gemma4_text", "", SLIDING | {"vocab_size_per_layer_input": VOCABULARY}),
    Architecture("doge"),
    Architecture("llama4_text", "", {"num_local_experts": 4}),
]
