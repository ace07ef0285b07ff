"""Utilities for tests of models and workers: tiny models in Hugging Face folders, rows, functions on several ranks."""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch

from alphaapollo.types import Row

VOCABULARY = 48
ARCHITECTURES = ["qwen3", "llama", "qwen3_moe", "gemma2", "granite"]


def _config(name: str, head_dim: int):
    from transformers import Gemma2Config, GraniteConfig, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    match name:
        case "qwen3":
            return Qwen3Config(**shape, head_dim=head_dim, tie_word_embeddings=True)
        case "llama":
            return LlamaConfig(**shape, tie_word_embeddings=False)
        case "qwen2":
            return Qwen2Config(**shape, tie_word_embeddings=True)
        case "qwen3_moe":
            return Qwen3MoeConfig(
                **shape,
                head_dim=head_dim,
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=24,
                decoder_sparse_step=1,
            )
        case "gemma2":  # caps scores and logits, and every other layer sees a window
            return Gemma2Config(
                **shape, head_dim=head_dim, sliding_window=4, final_logit_softcapping=0.5, attn_logit_softcapping=2.0
            )
        case "granite":
            return GraniteConfig(**shape, logits_scaling=3.0)
    raise AssertionError(name)


def build_model(name: str, head_dim: int = 8) -> torch.nn.Module:
    """Weights large enough that attention and logits are far from uniform."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(_config(name, head_dim), dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.data.normal_(std=0.2)
    return model.eval()


def save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)


def save_model(name: str, folder: Path) -> Path:
    build_model(name).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_scorer(name: str, folder: Path, kind: str = "SequenceClassification", num_labels: int = 1) -> Path:
    """A reward model with the trunk of the tiny model; `kind`: also TokenClassification."""
    import transformers

    config = _config(name, head_dim=8)
    config.num_labels = num_labels
    torch.manual_seed(3)
    model = getattr(transformers, f"AutoModelFor{kind}").from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def some_rows(count: int, seed: int = 0) -> list[Row]:
    """Rows of 4 to 18 tokens, some with tokens of an environment between two actions."""
    generator = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        prompt, response = (int(length) for length in generator.integers((2, 2), (7, 12)))
        mask = [0] * prompt + [1] * response
        if response > 6:
            mask[prompt + 2 : prompt + 4] = [0, 0]
        logprobs = -generator.random(len(mask)) * np.array(mask)
        tokens = generator.integers(2, VOCABULARY, len(mask)).tolist()
        rows.append(Row(tokens, mask, logprobs.tolist(), [len(mask) - 1]))
    return rows


def free_address() -> str:
    """Rendezvous address that no other test can use, unlike a free port."""
    return f"file://{_meetings().name}/{uuid4().hex}"


@functools.cache
def _meetings() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="alphaapollo-ranks-")


PRELOADED = [
    "alphaapollo.workers.critic",
    "alphaapollo.workers.policy",
    "alphaapollo.workers.reward_model",
    "alphaapollo.workers.sft",
    "transformers.models.qwen3.modeling_qwen3",
    "torch.distributed.fsdp",
]


def run_ranks(function: Callable[..., Any], num_ranks: int, *arguments: Any, timeout: float = 90.0) -> list[Any]:
    """Call `function(rank, num_ranks, address, *arguments)` in one process per rank. Returns the results by rank."""
    context = multiprocessing.get_context("forkserver")  # one process imports torch, once for all ranks of all tests
    context.set_forkserver_preload(PRELOADED)
    address = free_address()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_rank, args=(function, rank, num_ranks, address, arguments, folder))
            for rank in range(num_ranks)
        ]
        for process in processes:
            process.start()
        try:
            for process in processes:
                process.join(timeout)
            codes = [process.exitcode for process in processes]
            assert codes == [0] * num_ranks, f"exit codes of the ranks: {codes}"
        finally:
            for process in processes:
                process.kill()
        return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(num_ranks)]


def _rank(function: Callable[..., Any], rank: int, num_ranks: int, address: str, arguments: tuple, folder: str) -> None:
    torch.set_num_threads(1)
    result = function(rank, num_ranks, address, *arguments)
    Path(folder, str(rank)).write_bytes(pickle.dumps(result))
    os._exit(0)  # without waiting for threads of gloo
