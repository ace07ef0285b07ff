"""Patches of SGLang's scheduler, applied before it is forked, and the functions that it calls for a weight sync.

make_store          torch's store listens on one address
seed_requests       each request has its own seed, without SGLang's deterministic mode, which replaces kernels
get_no_stop_tokens  only the stop tokens of a request end it, not those of the model's configuration
exclude_tokens      the logits of tokens that must never be sampled
compute_digest      digest of the weights, as answer to a check of the weights
record_digest       digest of a LoRA adapter when it is loaded
ignore_pinning      LoRA layers ask for pinned memory, which needs a GPU
"""

from __future__ import annotations

import base64
import functools
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from alphaapollo.data.images import EXCLUDED_LOGIT
from alphaapollo.engines.weight_sync.digest import compute_joint_digest, format_digest, select_rank_parts
from alphaapollo.engines.weight_sync.shared_memory import read_safetensors
from alphaapollo.models.store import make_store
from alphaapollo.plugins.sglang.transfer import open_handle, split_bucket

DIGEST = "alphaapollo_digest"  # action of SGLang's check_weights
_adapter_digests: list[int] = []  # of the loaded LoRA adapters, in order


def patch_sglang(excluded_ids: Sequence[int], serves_adapters: bool, device: str) -> None:
    """Patch SGLang in this process. Call once, before the scheduler runs."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.logits_processor import LogitsProcessor
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.utils.weight_checker import WeightChecker

    sys.modules[torch.distributed.rendezvous.__module__]._create_c10d_store = make_store  # type: ignore[attr-defined]
    SamplingBatchInfo.from_schedule_batch = seed_requests(SamplingBatchInfo.from_schedule_batch)
    ModelConfig._get_hf_eos_token_id = get_no_stop_tokens
    WeightChecker.handle = compute_digest(WeightChecker.handle)
    if serves_adapters:
        from sglang.srt.lora.lora_manager import LoRAManager

        LoRAManager.load_lora_weights = record_digest(LoRAManager.load_lora_weights)
    if serves_adapters and device == "cpu":
        for name in ("tensor", "empty", "zeros", "arange"):
            setattr(torch, name, ignore_pinning(getattr(torch, name)))
        tensor_class: Any = torch.Tensor
        tensor_class.pin_memory = lambda tensor, *_: tensor
    if excluded_ids:
        LogitsProcessor._get_logits = exclude_tokens(LogitsProcessor._get_logits, excluded_ids)


def run_patched(patches: tuple[Any, ...], target: Callable[..., None], *arguments: Any) -> None:
    """Run a process of SGLang that does not inherit the patches of its parent. patches: arguments of patch_sglang."""
    patch_sglang(*patches)
    target(*arguments)


def seed_requests(make_batch_info: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap SamplingBatchInfo.from_schedule_batch, which ignores the seeds of requests."""

    @functools.wraps(make_batch_info)
    def make_seeded_batch_info(batch: Any, *arguments: Any, **options: Any) -> Any:
        info = make_batch_info(batch, *arguments, **options)
        seeds = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
        info.sampling_seed = torch.tensor(seeds, dtype=torch.int64, device=info.temperatures.device)
        return info

    return make_seeded_batch_info


def get_no_stop_tokens(model_config: Any) -> None:
    """Replace ModelConfig._get_hf_eos_token_id. With ignore_eos, SGLang would ignore the stop tokens of requests."""


def exclude_tokens(get_logits: Callable[..., torch.Tensor], token_ids: Sequence[int]) -> Callable[..., torch.Tensor]:
    """Wrap LogitsProcessor._get_logits, which computes the logits [rows, vocabulary] of prompts and answers."""
    ids = torch.tensor(token_ids, dtype=torch.long)
    on_device = functools.cache(ids.to)

    @functools.wraps(get_logits)
    def get_logits_without_excluded(*arguments: object, **options: object) -> torch.Tensor:
        logits = get_logits(*arguments, **options)
        return logits.index_fill_(1, on_device(logits.device), EXCLUDED_LOGIT)

    return get_logits_without_excluded


def compute_digest(handle: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap WeightChecker.handle to answer the action DIGEST with the digest of the last LoRA adapter, if any, or of all
    parameters."""

    @functools.wraps(handle)
    def handle_or_compute_digest(checker: Any, action: str, *arguments: Any, role: str, **options: Any) -> Any:
        if action != DIGEST:
            return handle(checker, action, *arguments, role=role, **options)
        placement = checker._placement
        if _adapter_digests:
            total = _adapter_digests[-1]
        else:
            total = compute_joint_digest(select_tensors_for_digest(checker._get_model(), placement["tp_rank"]))
        ranks = {"role": role, "rank": placement["tp_rank"], "size": placement["tp_size"]}
        return {"checksums": {DIGEST: format_digest(total)}, "parallelism_info": placement | ranks}

    return handle_or_compute_digest


def select_tensors_for_digest(model: torch.nn.Module, tp_rank: int) -> Iterator[torch.Tensor]:
    """Yield the parts of the parameters that a tensor-parallel rank adds to the digest."""
    seen: set[int] = set()  # layers may share a parameter
    for layer in model.modules():
        for name, parameter in layer.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield from select_rank_parts(layer, name, parameter, tp_rank)


def record_digest(load: Callable[..., None]) -> Callable[..., None]:
    """Wrap LoRAManager.load_lora_weights. SGLang stacks the tensors of fused layers, and adds zeros for layers without
    adapter, which do not change the digest."""

    @functools.wraps(load)
    def load_and_record_digest(manager: Any, adapter: Any) -> None:
        load(manager, adapter)
        layers = manager.loras[adapter.lora_id].layers
        _adapter_digests.append(compute_joint_digest(tensor for layer in layers for tensor in layer.weights.values()))

    return load_and_record_digest


def ignore_pinning(make_tensor: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a function of torch to ignore its argument `pin_memory`."""

    @functools.wraps(make_tensor)
    def make_unpinned_tensor(*arguments: object, pin_memory: bool = False, **options: object) -> torch.Tensor:
        return make_tensor(*arguments, **options)

    return make_unpinned_tensor


def load_shared_memory(model: Any, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load weights, as SGLang's custom weight loader: the name of the only tensor is the folder of the weights."""
    ((folder, _),) = named_tensors
    model.load_weights(read_safetensors(Path(folder)))


def load_cuda_bucket(model: Any, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load a bucket of weights over CUDA IPC, as SGLang's custom weight loader: the name of the only tensor has its
    description and handles (plugins/sglang/transfer.py)."""
    ((encoded, _),) = named_tensors
    info = pickle.loads(base64.b64decode(encoded))
    model.load_weights(split_bucket(open_handle(info["handles"]), info))
    torch.cuda.current_stream().synchronize()  # afterwards, the trainer frees the bucket
