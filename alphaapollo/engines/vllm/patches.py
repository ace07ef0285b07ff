"""Patches of vLLM internals, applied in the processes that run the model.

record_digest_before_packing CPU: record the digest of each weight when vLLM packs it for its kernel
record_quantized_digest      record the digest of codes and scales when vLLM packs them for its kernel
repack_experts_on_each_load  CPU: pack expert weights again after each weight sync
use_dequantized_weights      CPU: weights of 4 bits in float32, or without AVX-512, for which vLLM has no kernel
pad_single_row               CPU: results of a sequence do not depend on the batch size
skip_base_rows               CPU: in mixed batches, requests without an adapter do not get the adapter of the last slot
use_fused_kernels            CPU: RMS norms and SwiGLU are one kernel each, which vLLM has but uses on GPUs only
return_untruncated_logprobs  log-probs of sampled tokens are computed before top-p and top-k
return_kept_tokens, omit_complete_sets: sampling_mask.py
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from alphaapollo.engines.vllm.sampling_mask import KEPT, omit_complete_sets, return_kept_tokens
from alphaapollo.engines.vllm.settings import VllmObject, is_triton_interpreted
from alphaapollo.engines.weight_sync.digest import compute_joint_digest, select_rank_parts

UNPACKED_DIGEST = "alphaapollo_unpacked_digest"  # attribute of a layer: future of its weight's digest before packing
QUANTIZED_DIGEST = "alphaapollo_quantized_digest"  # attribute of a layer: digest of its codes and scales before packing


def patch_vllm() -> None:
    """Patch vLLM in this process. Call once, before the model is built."""
    from vllm.model_executor.layers import utils
    from vllm.model_executor.model_loader import base_loader
    from vllm.platforms import current_platform
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    TopKTopPSampler.forward_native = return_untruncated_logprobs(TopKTopPSampler.forward_native)
    process = base_loader.process_weights_after_loading
    base_loader.process_weights_after_loading = record_quantized_digest(process)
    if current_platform.is_cpu():
        from vllm.lora.ops.torch_ops import lora_ops
        from vllm.lora.punica_wrapper import punica_cpu
        from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        use_fused_kernels()
        use_dequantized_weights()
        # Adapters do not change the output head. vLLM's kernel for such adapters fails if a batch has prompt log-probs.
        punica_cpu.PunicaWrapperCPU.add_lora_logits = lambda self, logits, *arguments, **options: logits
        lora_ops.bgmv_shrink = punica_cpu.bgmv_shrink = skip_base_rows(lora_ops.bgmv_shrink)
        process = UnquantizedFusedMoEMethod.process_weights_after_loading
        UnquantizedFusedMoEMethod.process_weights_after_loading = repack_experts_on_each_load(process)
        utils.dispatch_cpu_unquantized_gemm = record_digest_before_packing(utils.dispatch_cpu_unquantized_gemm)
        TopKTopPSampler.forward_cpu = return_untruncated_logprobs(TopKTopPSampler.forward_cpu)
        GPUModelRunner.sample_tokens = return_kept_tokens(GPUModelRunner.sample_tokens)
        if is_triton_interpreted():
            from vllm.v1.worker.gpu.sample import sampler

            sampler.apply_top_k_top_p = topk_topp_sampler.apply_top_k_top_p_pytorch
    if not current_platform.is_cpu() or is_triton_interpreted():
        from vllm.v1.worker.gpu.sample.output import SamplingMaskTensors
        from vllm.v1.worker.gpu.sample.sampler import Sampler

        Sampler._sample_random = return_untruncated_logits(Sampler._sample_random)
        SamplingMaskTensors.tolists = omit_complete_sets(SamplingMaskTensors.tolists)


def record_digest_before_packing(dispatch: Callable[..., None]) -> Callable[..., None]:
    """Wrap vLLM's function that packs the weight of a linear layer for a CPU kernel: record the weight's digest first.
    vLLM deletes the unpacked weight, so its digest cannot be computed later."""
    from vllm.distributed import get_tensor_model_parallel_rank

    digest_thread = ThreadPoolExecutor(1)

    @functools.wraps(dispatch)
    def record_weight_digest_and_pack(layer: VllmObject, remove_weight: bool) -> None:
        is_matrix = not layer.weight.is_meta and layer.weight.ndim == 2
        if is_matrix:
            parts = list(select_rank_parts(layer, "weight", layer.weight, get_tensor_model_parallel_rank()))
            setattr(layer, UNPACKED_DIGEST, digest_thread.submit(compute_joint_digest, parts))
        dispatch(layer, remove_weight)
        if is_matrix:
            layer.cpu_linear = pad_single_row(layer.cpu_linear)

    return record_weight_digest_and_pack


def record_quantized_digest(process_weights: Callable[..., None]) -> Callable[..., None]:
    """Wrap vLLM's function that packs the loaded weights of a model for its kernels: first record the digest of the
    codes and scales of each layer with weights of 4 bits (compressed-tensors)."""

    @functools.wraps(process_weights)
    def record_digests_and_process_weights(model: torch.nn.Module, *arguments: object) -> None:
        for layer in model.modules():
            if isinstance(packed := getattr(layer, "weight_packed", None), torch.Tensor):
                codes, scale = packed.data.view(torch.uint8), layer.get_parameter("weight_scale").data
                setattr(layer, QUANTIZED_DIGEST, compute_joint_digest([codes.float(), scale]))
        process_weights(model, *arguments)

    return record_digests_and_process_weights


def skip_base_rows(shrink: Callable[..., None]) -> Callable[..., None]:
    """Wrap vLLM's function that computes A x of each row of a batch with the adapter in the row's slot: rows without
    an adapter, whose slot is -1, get 0. vLLM reads -1 as the last slot."""

    def compute_rows_with_adapters(
        inputs: torch.Tensor, weights: torch.Tensor, output: torch.Tensor, slots: torch.Tensor, scaling: float = 1.0
    ) -> None:
        shrink(inputs, weights, output, slots, scaling)
        output[slots < 0] = 0.0

    return compute_rows_with_adapters


def repack_experts_on_each_load(process_weights: Callable[..., None]) -> Callable[..., None]:
    """Wrap vLLM's `process_weights_after_loading` of expert layers, so that every load packs the weights. On a CPU,
    vLLM packs them only at the first load and would read later weights as if they were packed."""

    @functools.wraps(process_weights)
    def reset_kernel_and_process_weights(self: VllmObject, layer: VllmObject) -> None:
        self.moe_kernel = None
        process_weights(self, layer)

    return reset_kernel_and_process_weights


def pad_single_row(linear: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a linear layer's function to compute an input [1, H] as two equal rows. oneDNN rounds a single float32 row
    differently from the same row in a larger batch, so results would depend on the batch size."""

    @functools.wraps(linear)
    def compute_single_row_as_two(
        hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if hidden.ndim == 2 and hidden.shape[0] == 1:
            return linear(hidden.expand(2, -1).contiguous(), weight, bias)[:1]
        return linear(hidden, weight, bias)

    return compute_single_row_as_two


def use_dequantized_weights() -> None:
    """Dequantize weights of 4 bits when a model is loaded, if vLLM has no kernel for them. Its kernel computes in 16
    bits only, and needs AVX-512."""
    from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel
    from vllm.model_executor.layers.quantization.utils.quant_utils import unpack_quantized_values_into_int32

    process, apply = CPUWNA16LinearKernel.process_weights_after_loading, CPUWNA16LinearKernel.apply_weights
    linear = pad_single_row(torch.nn.functional.linear)

    def process_weights(self: VllmObject, layer: VllmObject) -> None:
        scale = layer.weight_scale.data
        has_kernel = hasattr(torch.ops._C, "cpu_gemm_wna16") and scale.dtype != torch.float32
        if has_kernel or self.config.zero_points or layer.weight_packed.packed_dim != 1:
            process(self, layer)
            return
        codes = unpack_quantized_values_into_int32(layer.weight_packed.data, self.config.weight_type, 1) - 8
        groups = codes.unflatten(1, (scale.shape[1], -1)).float() * scale[..., None].float()
        layer.dequantized = groups.flatten(1).to(scale.dtype)

    def compute(self: VllmObject, layer: VllmObject, x: torch.Tensor, bias: torch.Tensor | None = None) -> object:
        dequantized = getattr(layer, "dequantized", None)
        return apply(self, layer, x, bias) if dequantized is None else linear(x, dequantized, bias)

    CPUWNA16LinearKernel.process_weights_after_loading, CPUWNA16LinearKernel.apply_weights = process_weights, compute


def use_fused_kernels() -> None:
    """Compute RMS norms and SwiGLU with vLLM's CPU kernels instead of several operations of torch each. For a model of
    135M parameters, these operations took a fifth of the time of a decoding step of 128 sequences."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.layernorm import RMSNorm

    def normalize(self: VllmObject, x: torch.Tensor, residual: torch.Tensor | None = None) -> object:
        if not self.has_weight or self.variance_size_override is not None or self.weight.dtype != x.dtype:
            return self.forward_native(x, residual)
        x, weight = x.contiguous(), self.weight.data
        if residual is not None:
            ops.fused_add_rms_norm(x, residual, weight, self.variance_epsilon)  # in place
            return x, residual
        normalized = torch.empty_like(x)
        ops.rms_norm(normalized, x, weight, self.variance_epsilon)
        return normalized

    def activate(self: VllmObject, x: torch.Tensor) -> torch.Tensor:
        product = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
        torch.ops._C.silu_and_mul(product, x.contiguous())
        return product

    RMSNorm.forward_cpu, SiluAndMul.forward_cpu = normalize, activate


def return_untruncated_logprobs(forward: Callable[..., Any]) -> Callable[..., object]:
    """Wrap the sampler of vLLM's V1 model runner: return log-probs from before instead of after top-p and top-k, unless
    the engine returns sampling masks (return_kept_tokens)."""

    @functools.wraps(forward)
    def sample_tokens(self: Any, logits: torch.Tensor, generators: object, top_k: object, top_p: object) -> object:
        if hasattr(self, KEPT):
            sampled, logprobs = forward(self, logits, generators, top_k, top_p)
            setattr(self, KEPT, logprobs > -torch.inf)
            return sampled, logprobs
        if top_k is None and top_p is None:
            return forward(self, logits, generators, top_k, top_p)
        logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
        sampled, _ = forward(self, logits, generators, top_k, top_p)
        return sampled, logprobs

    return sample_tokens


def return_untruncated_logits(sample_random: Callable[..., Any]) -> Callable[..., object]:
    """Wrap the sampler of vLLM's V2 model runner to return logits without the truncation by top-p and top-k, unless the
    engine returns sampling masks: the log-probs are then those of the kept tokens."""

    @functools.wraps(sample_random)
    def sample_tokens(
        self: Any, logits: torch.Tensor, mapping: Any, mapping_np: Any, pos: Any, top_k: Any, top_p: Any, *flags: bool
    ) -> object:  # vLLM 0.32 passes one flag, and 0.33 two
        if self.return_sampling_mask or (top_k is None and top_p is None):
            return sample_random(self, logits, mapping, mapping_np, pos, top_k, top_p, *flags)
        untruncated = logits.clone()
        sampled, _ = sample_random(self, logits, mapping, mapping_np, pos, top_k, top_p, *flags)
        return sampled, untruncated

    return sample_tokens
