"""Log-probs of a row do not depend on the rows beside it, on packing or on gradient checkpointing, and equal those of
transformers' eager attention. The rows are longer than every sliding window and RoPE limit of the models."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from alphaapollo.config.resolve import resolve_model
from alphaapollo.config.schema import Model
from alphaapollo.data.batch import Rows
from alphaapollo.launch.input_checks import choose_kernels
from alphaapollo.models.load import load_causal_lm
from alphaapollo.models.micro_batch import MicroBatchBuilder
from alphaapollo.models.policy import PolicyModel

CPU, LENGTHS = torch.device("cpu"), [80, 20, 45]
SHAPE = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
SHORT, LONG = [1.0, 1.5, 2.0, 2.5], [2.0, 4.0, 5.0, 6.0]
WINDOW = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}


def rope(kind: str, **keys: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **keys}}


def longrope(short: list[float], long: list[float], original: int, **keys: Any) -> dict[str, Any]:
    return rope("longrope", short_factor=short, long_factor=long, original_max_position_embeddings=original, **keys) | {
        "original_max_position_embeddings": original
    }


MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {"window": WINDOW},
    "qwen2_moe": {"window": EXPERTS | WINDOW | {"shared_expert_intermediate_size": 24}},
    "qwen3": {"plain": {}},
    "qwen3_moe": {"plain": EXPERTS},
    "phi3": {
        "long factors": longrope(SHORT, LONG, 32),
        "short factors": longrope(SHORT, LONG, 100),
    },
    "phimoe": {"long factors": longrope(SHORT, LONG, 32, short_mscale=1.2, long_mscale=1.4)},
    "llama": {
        "dynamic": rope("dynamic", factor=4.0) | {"max_position_embeddings": 32},
        "linear": rope("linear", factor=2.0),
        "yarn": rope("yarn", factor=4.0, original_max_position_embeddings=32),
        "llama3": rope(
            "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
        ),
    },
    "mistral": {"window": {"sliding_window": 16}},
    "gemma2": {"window": {"sliding_window": 16}},
    "gemma3_text": {"window": {"sliding_window": 16}},
    "olmo2": {"plain": {}},
    "granite": {"plain": {"logits_scaling": 3.0}},
    "opt": {"plain": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.3}},
    "gpt_oss": {"window": {"sliding_window": 16, "num_local_experts": 4, "num_experts_per_tok": 2}},
    "deepseek_v3": {
        "plain": {
            "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 24,
            "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
            "num_key_value_heads": 4, "first_k_dense_replace": 1,
        }
    },
    "glm4": {"plain": {}},
    "qwen3_next": {"gated delta net": DELTA_NET | EXPERTS | {"shared_expert_intermediate_size": 24}},
    "qwen3_5_text": {"gated delta net": DELTA_NET},
}  # fmt: skip

AS_VLLM_COMPUTES = {  # independent of the other rows, where transformers is not
    ("phi3", "long factors"): longrope(LONG, LONG, 32),
    ("phimoe", "long factors"): longrope(LONG, LONG, 32, short_mscale=1.4, long_mscale=1.4),
    ("llama", "dynamic"): rope("default"),
}


def make_policy(folder: Any, attention: str, checkpointing: bool = False) -> PolicyModel:
    model = resolve_model(Model(path=str(folder), enable_gradient_checkpointing=checkpointing), "cpu", max_length=100)
    return PolicyModel(load_causal_lm(model, attention, torch.float32))


def compute_row_logprobs(policy: PolicyModel, attention: str, positions: list[int]) -> list[torch.Tensor]:
    """Log-probs of the rows at `positions`, computed in one micro-batch."""
    generator = np.random.default_rng(5)
    tokens, starts = generator.integers(2, 48, sum(LENGTHS)), [1] * len(LENGTHS)
    count = sum(LENGTHS) - sum(starts)
    rows = Rows(
        token_ids=tokens,
        lengths=np.array(LENGTHS),
        response_starts=np.array(starts),
        action_mask=np.ones(count, dtype=np.uint8),
        rollout_logprobs=np.zeros(count, dtype=np.float32),
    )
    logprobs = policy(MicroBatchBuilder(attention == "padded", CPU).build(rows, positions), 1.0).logprobs
    return list(logprobs.split([LENGTHS[one] - 1 for one in positions]))


@pytest.mark.parametrize(("name", "variant"), [(name, variant) for name in MODELS for variant in MODELS[name]])
def test_logprobs_of_a_row_depend_on_nothing_else(tmp_path, name: str, variant: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(7)
    config = AutoConfig.for_model(name, **SHAPE | MODELS[name][variant])
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    for parameter in plain.parameters():
        if parameter.ndim >= 2:
            parameter.data.normal_(std=0.2)
    plain.eval().save_pretrained(tmp_path)
    if same := AS_VLLM_COMPUTES.get((name, variant)):
        weights = plain.state_dict()
        config = AutoConfig.for_model(name, **SHAPE | MODELS[name][variant] | same)
        plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
        plain.load_state_dict(weights)
    offsets = np.cumsum([0, *LENGTHS])
    tokens = np.random.default_rng(5).integers(2, 48, sum(LENGTHS))
    expected = []
    with torch.no_grad():
        for begin, end in itertools.pairwise(offsets):
            ids = torch.from_numpy(tokens[begin:end])[None]
            logits = plain(ids).logits[0, :-1]
            expected.append(logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0])
    for attention in ("padded",) if "gated delta net" in variant else ("padded", "sdpa"):
        for checkpointing in (False, True):
            policy = make_policy(tmp_path, attention, checkpointing)
            together = compute_row_logprobs(policy, attention, [0, 1, 2])
            sum(part.sum() for part in together).backward()
            alone = [compute_row_logprobs(policy, attention, [one])[0] for one in (0, 1, 2)]
            torch.testing.assert_close(together, expected, rtol=1e-4, atol=2e-5)
            torch.testing.assert_close(alone, expected, rtol=1e-4, atol=2e-5)


def test_recurrent_layers_need_padded_rows(tmp_path) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model("qwen3_5_text", **SHAPE | DELTA_NET).save_pretrained(tmp_path)
    configured = Model(path=str(tmp_path))
    assert choose_kernels(resolve_model(configured, "cuda"), configured).attention == "padded"
    configured = Model(path=str(tmp_path), attention="sdpa")
    with pytest.raises(ValueError, match=r"layers of type linear_attention, .* Set model\.attention=padded"):
        choose_kernels(resolve_model(configured, "cuda"), configured)
