"""Patches of vLLM internals, applied in the processes that run the model.

record_packed_digest         record the digest of the weights that each packed CPU layer uses
repack_experts               pack expert weights again after each weight update
pad_single_row               compute a single row with the same bits as in a larger batch
return_untruncated_logprobs  return log-probs after temperature, before top-p and top-k
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from alphaapollo.engines.vllm.interpreted import is_interpreted
from alphaapollo.weight_sync.digest import tensors_digest
from alphaapollo.weight_sync.vllm_digest import select_owned_parts

PACKED_DIGEST = "alphaapollo_packed_digest"


def apply_patches() -> None:
    """Patch vLLM in this process. Call once, before the model is built."""
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    TopKTopPSampler.forward_native = return_untruncated_logprobs(TopKTopPSampler.forward_native)
    if current_platform.is_cpu():
        from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

        process = UnquantizedFusedMoEMethod.process_weights_after_loading
        UnquantizedFusedMoEMethod.process_weights_after_loading = repack_experts(process)
        utils.dispatch_cpu_unquantized_gemm = record_packed_digest(utils.dispatch_cpu_unquantized_gemm)
        TopKTopPSampler.forward_cpu = return_untruncated_logprobs(TopKTopPSampler.forward_cpu)
        if is_interpreted():
            from vllm.v1.worker.gpu.sample import sampler

            sampler.apply_top_k_top_p = topk_topp_sampler.apply_top_k_top_p_pytorch
    if not current_platform.is_cpu() or is_interpreted():
        from vllm.v1.worker.gpu.sample.sampler import Sampler

        Sampler._sample_random = return_untruncated_logits(Sampler._sample_random)


def record_packed_digest(dispatch: Callable[..., None]) -> Callable[..., None]:
    """Wrap `dispatch` to record the digest of each weight before vLLM packs it. On a CPU vLLM packs linear layers for
    their kernel and deletes the weight, so the digest cannot be computed later."""
    digests = ThreadPoolExecutor(1)

    @functools.wraps(dispatch)
    def pack_and_record(layer: Any, remove_weight: bool) -> None:
        is_matrix = not layer.weight.is_meta and layer.weight.ndim == 2
        if is_matrix:
            parts = list(select_owned_parts(layer, "weight", layer.weight))
            setattr(layer, PACKED_DIGEST, digests.submit(tensors_digest, parts))
        dispatch(layer, remove_weight)
        if is_matrix:
            layer.cpu_linear = pad_single_row(layer.cpu_linear)

    return pack_and_record


def repack_experts(process: Callable[..., None]) -> Callable[..., None]:
    """Wrap `process` to build the expert kernel at each load. On a CPU vLLM packs expert weights only when it builds
    the kernel at the first load, and would read weights of later loads as if they were packed."""

    @functools.wraps(process)
    def rebuild_and_process(self: Any, layer: Any) -> None:
        self.moe_kernel = None
        process(self, layer)

    return rebuild_and_process


def pad_single_row(linear: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap `linear` to compute a single row as two equal rows. oneDNN rounds a single float32 row differently from the
    same row in a larger batch, so results would depend on the batch size."""

    @functools.wraps(linear)
    def pad_to_two_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if x.ndim == 2 and x.shape[0] == 1:
            return linear(x.expand(2, -1).contiguous(), weight, bias)[:1]
        return linear(x, weight, bias)

    return pad_to_two_rows


def return_untruncated_logprobs(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `forward` of vLLM's V1 model runner to return log-probs before top-p and top-k instead of after."""

    @functools.wraps(forward)
    def sample(self: Any, logits: torch.Tensor, generators: Any, k: Any, p: Any) -> Any:
        if k is None and p is None:
            return forward(self, logits, generators, k, p)
        logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
        sampled, _ = forward(self, logits, generators, k, p)
        return sampled, logprobs

    return sample


def return_untruncated_logits(sample_random: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the sampler of vLLM's V2 model runner to return untruncated logits, which become log-probs later."""

    @functools.wraps(sample_random)
    def sample(
        self: Any, logits: torch.Tensor, mapping: Any, mapping_np: Any, pos: Any, top_k: Any, top_p: Any, fused: bool
    ) -> Any:
        if top_k is None and top_p is None:
            return sample_random(self, logits, mapping, mapping_np, pos, top_k, top_p, fused)
        untruncated = logits.clone()
        sampled, _ = sample_random(self, logits, mapping, mapping_np, pos, top_k, top_p, fused)
        return sampled, untruncated

    return sample
