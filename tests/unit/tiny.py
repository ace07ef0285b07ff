"""Utilities for tests of models and workers: tiny models in Hugging Face folders, rows, functions on several ranks."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from uuid import uuid4

import numpy as np
import torch

from alphaapollo.types import Row

VOCABULARY = 48
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}
CAPS = {"final_logit_softcapping": 0.5, "attn_logit_softcapping": 2.0}
SETTINGS: dict[str, dict[str, Any]] = {
    "qwen3": {"tie_word_embeddings": True},
    "llama": {"tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3_moe": EXPERTS,
    "gemma2": {"sliding_window": 4, **CAPS},  # every other layer sees a window
    "granite": {"logits_scaling": 3.0},
}


def plan_ranks(num_ranks: int, max_tokens: int) -> Any:
    """What the distribution of rows needs of a Plan."""
    placement = SimpleNamespace(data_parallel_size=num_ranks)
    return SimpleNamespace(placement=placement, max_tokens=max_tokens, padded=True)


def _config(name: str, head_dim: int, num_layers: int = 2) -> Any:
    from transformers import AutoConfig

    head = {"head_dim": head_dim} if name in ("qwen3", "qwen3_moe", "gemma2") else {}
    return AutoConfig.for_model(name, **SHAPE | SETTINGS[name] | head, num_hidden_layers=num_layers)


def build_model(name: str, head_dim: int = 8, num_layers: int = 2) -> torch.nn.Module:
    """Weights large enough that attention and logits are far from uniform."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(_config(name, head_dim, num_layers), dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.data.normal_(std=0.2)
    return model.eval()


def save_tokenizer(folder: Path, num_tokens: int = VOCABULARY) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, num_tokens)}
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
    "alphaapollo.workers.finetuning_worker",
    "transformers.models.qwen3.modeling_qwen3",
    "torch.distributed.fsdp",
]
_kept: list[tuple[BaseProcess, Connection]] = []  # processes for the ranks of later calls, and their pipes


def run_ranks(
    function: Callable[..., Any], num_ranks: int, *arguments: Any, timeout: float = 90.0, fresh: bool = False
) -> list[Any]:
    """Call `function(rank, num_ranks, address, *arguments)` in one process per rank. Returns the results by rank.

    The processes are kept for later calls, unless one fails or exceeds the time. fresh: start processes for this call
    only, because the function starts processes or changes state that `_serve` does not reset.
    """
    alive = [one for one in _kept if one[0].is_alive()]
    group, _kept[:] = ([], alive) if fresh else (alive[:num_ranks], alive[num_ranks:])
    group += [_start_rank(is_kept=not fresh) for _ in range(num_ranks - len(group))]
    address, end, results = free_address(), time.monotonic() + timeout, dict[Any, Any]()
    try:
        for rank, (_, connection) in enumerate(group):
            connection.send_bytes(pickle.dumps((function, rank, num_ranks, address, *arguments)))
        while waiting := [connection for _, connection in group if connection not in results]:
            ready: Any = wait(waiting, max(end - time.monotonic(), 0.0))
            assert ready, f"no result within {timeout} s"
            for connection in ready:
                result, error = pickle.loads(connection.recv_bytes())
                assert not error, error
                results[connection] = result
        if not fresh:
            _kept[:0] = group
    except (AssertionError, EOFError, ConnectionError) as error:
        for process, _ in group:
            process.join(1.0)  # the other ranks may end, too, because a connection is closed
        error.add_note(f"exit codes of the ranks: {[process.exitcode for process, _ in group]}")
        raise
    finally:
        for process, _ in [one for one in group if one not in _kept]:
            process.kill()
            process.join()
    return [results[connection] for _, connection in group]


def _start_rank(is_kept: bool) -> tuple[BaseProcess, Connection]:
    context = multiprocessing.get_context("forkserver")  # one process imports torch, once for all ranks
    context.set_forkserver_preload(PRELOADED)
    own, other = context.Pipe()
    process = context.Process(target=_serve, args=(other,), daemon=is_kept)  # a daemon ends with pytest
    process.start()
    return process, own


def _serve(connection: Connection) -> None:
    """Run functions on one rank until pytest closes the pipe, and reset the state that they change."""
    from torch.distributed.tensor import _redistribute, debug

    from alphaapollo.models import sharding
    from alphaapollo.workers.process_group import shut_down_rank

    if multiprocessing.current_process().daemon:
        os.close(forkserver._forkserver._forkserver_alive_fd)  # otherwise the fork server could not be stopped
    gc.freeze()  # a collection takes 0.3 s if it visits the objects of all imported modules
    while True:
        try:
            function, *arguments = pickle.loads(connection.recv_bytes())
        except EOFError:
            os._exit(0)  # without waiting for threads of gloo
        try:
            torch.set_num_threads(1)
            torch.manual_seed(0)
            np.random.seed(0)
            with mock.patch.dict(os.environ), mock.patch.dict(vars(sharding)):
                result = function(*arguments)
            shut_down_rank()
            debug._clear_sharding_prop_cache()  # DTensor's caches contain process groups
            _redistribute._gen_transform_infos.cache_clear()
        except BaseException:  # noqa: BLE001 the caller raises it
            connection.send_bytes(pickle.dumps((None, traceback.format_exc())))
            os._exit(1)
        connection.send_bytes(pickle.dumps((result, "")))
