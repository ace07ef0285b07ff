"""Translate an EngineSpec into SGLang's environment variables and server arguments, sampling settings to SGLang's, and
SGLang's outputs to completions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from alphaapollo.config.resolve import get_resolved
from alphaapollo.engines.types import EngineSpec, HttpAnswer, HttpSampling
from alphaapollo.types import Completion, JsonObject, Sampling, StopReason

WEIGHT_LOADER = "alphaapollo.plugins.sglang.patches.load_shared_memory"
BUCKET_LOADER = "alphaapollo.plugins.sglang.patches.load_cuda_bucket"
USES_CPU = "SGLANG_USE_CPU_ENGINE"  # environment variable
SPARE_TOKENS = 8  # SGLang refuses prompts of almost the context length, and stops an answer one token before it
DAY = 86400.0
LORA_LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_RESERVED = """
    base_gpu_id chunked_prefill_size context_length custom_weight_loader device disable_radix_cache dp_size dtype
    enable_deterministic_inference enable_lora enable_memory_saver enable_return_routed_experts
    enable_weights_cpu_backup ep_size json_model_override_args load_format log_level lora_backend lora_paths
    lora_target_modules max_lora_rank max_loras_per_batch max_prefill_tokens max_running_requests max_total_tokens
    mem_fraction_static model_path nnodes node_rank page_size pp_size random_seed sampling_backend
    skip_tokenizer_init tokenizer_path tokenizer_worker_num tp_size trust_remote_code
    watchdog_timeout weight_version
"""
ARGUMENT_FILES = "sglang/lib/*/site-packages/sglang/srt/arg_groups/fields/*.py"  # see vLLM's settings
RESERVED_ARGUMENTS = frozenset(_RESERVED.split())
"""Arguments of SGLang that follow from other keys, or that are not supported."""


def build_environment(spec: EngineSpec) -> dict[str, str]:
    """Return the environment variables of the engine's processes. Set them before SGLang is imported."""
    variables = {
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # for SPARE_TOKENS, which are no positions of the model
        "SGLANG_PLUGINS": "none",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if spec.device == "cpu":
        variables |= {
            USES_CPU: "1",
            "OMP_NUM_THREADS": str(spec.rollout.cpu_threads or 1),
            "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads would make other processes up to 30 times slower
            "TORCH_COMPILE_DISABLE": "1",
        }
    return variables | ({"HF_HUB_OFFLINE": "1"} if Path(spec.model_path).is_dir() else {})


def build_server_arguments(spec: EngineSpec, kv_token_bytes: int) -> JsonObject:
    """Return the arguments of SGLang's ServerArgs. rollout.engine_kwargs.sglang adds others.

    kv_token_bytes: bytes of a token in the KV cache, on a CPU.
    """
    rollout = spec.rollout
    tokenizer = spec.chat_tokenizer or (spec.tokenizer_path if rollout.stop_strings else "")  # finds stop strings
    arguments: JsonObject = {
        "model_path": spec.model_path,
        "trust_remote_code": spec.trust_remote_code,
        "tokenizer_path": tokenizer or None,
        "skip_tokenizer_init": not tokenizer,  # requests and completions are token ids
        "dtype": spec.dtype,
        "device": spec.device,
        "sampling_backend": "pytorch",  # the others have no seeds
        "context_length": spec.max_model_len + SPARE_TOKENS,
        "max_running_requests": get_resolved(rollout.max_num_seqs),
        "disable_radix_cache": not rollout.enable_prefix_caching,
        "custom_weight_loader": [WEIGHT_LOADER, BUCKET_LOADER],
        "weight_version": "0",
        "random_seed": 0,  # every request has its own seed
        "log_level": "info",
        "watchdog_timeout": DAY,  # a step may be slow on a busy CPU; the run has its own detection of stalls
    }
    if spec.transport == "adapter":
        arguments |= {
            "enable_lora": True,
            "lora_backend": "torch_native" if spec.device == "cpu" else "triton",
            "lora_target_modules": LORA_LAYERS,
            "max_lora_rank": spec.lora_rank,
            "max_loras_per_batch": 2,  # the adapter, and none before the first weight sync
        }
    build = _build_cpu_arguments if spec.device == "cpu" else _build_gpu_arguments
    return arguments | build(spec, kv_token_bytes) | rollout.engine_kwargs.sglang


def _build_cpu_arguments(spec: EngineSpec, kv_token_bytes: int) -> JsonObject:
    rollout, context = spec.rollout, spec.max_model_len + SPARE_TOKENS
    for key, value in rollout.engine_kwargs.sglang.items():
        if key == "attention_backend" and value != "torch_native":
            raise ValueError(f"rollout.engine_kwargs.sglang.{key}={value} needs a GPU. Remove it.")
    cached = int(rollout.kv_cache_gib * 2**30) // kv_token_bytes
    if cached < context:
        raise ValueError(
            f"rollout.kv_cache_gib={rollout.kv_cache_gib:g} is too small: the KV cache has {cached} tokens, and a "
            f"sequence has up to {context}. Set {kv_token_bytes * context / 2**30:.2g} or more."
        )
    return {
        "attention_backend": "torch_native",
        "max_total_tokens": cached,
        "max_prefill_tokens": max(rollout.max_num_batched_tokens, spec.max_model_len),
        "chunked_prefill_size": -1,
    }


def _build_gpu_arguments(spec: EngineSpec, _: int) -> JsonObject:
    rollout = spec.rollout
    return {
        "tp_size": rollout.tensor_model_parallel_size,
        "ep_size": rollout.expert_parallel_size,
        "mem_fraction_static": get_resolved(rollout.gpu_memory_utilization),
        "chunked_prefill_size": rollout.max_num_batched_tokens,
        "enable_memory_saver": spec.is_colocated,
        # An engine of LoRA adapters never receives its base model again.
        "enable_weights_cpu_backup": spec.is_colocated and spec.transport == "adapter",
    }


def make_sampling_params(sampling: Sampling) -> dict[str, object]:
    """Convert sampling settings. With ignore_eos, SGLang would ignore stop_token_ids, too."""
    return {
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k if sampling.top_k > 0 else -1,
        "sampling_seed": sampling.seed,
        "stop_token_ids": list(sampling.stop_token_ids),
        "stop": list(sampling.stop),
    }


def make_http_params(request: HttpSampling) -> JsonObject:
    """Return SGLang's sampling parameters of a request to the HTTP API. Raises ValueError for min_p, which would end
    the scheduler: SGLang has no min_p for requests with a seed."""
    if "min_p" in request.penalties:
        raise ValueError("min_p: SGLang does not support this setting with seeds. Remove it, or use rollout.name=vllm.")
    return make_sampling_params(request.sampling) | dict(request.penalties)


def build_completion(answer: JsonObject) -> Completion:
    """Build the completion of a finished request from SGLang's output: `output_ids` and `meta_info`, whose log-probs
    are (log-prob, token, text)."""
    meta, token_ids = answer["meta_info"], answer["output_ids"]
    logprobs = meta["output_token_logprobs"]
    assert [token for _, token, _ in logprobs] == token_ids, "log-probs of other tokens"
    spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": len(token_ids)}]
    *earlier, (version, _) = [(int(span["version"]), span["end"] - span["start"]) for span in spans]
    return Completion(
        token_ids=token_ids,
        logprobs=[logprob for logprob, _, _ in logprobs],
        stop_reason=StopReason(meta["finish_reason"]["type"]),
        weight_version=version,
        num_cached_tokens=meta["cached_tokens"],
        earlier_version_token_counts=tuple(earlier),
    )


def build_http_answer(answer: JsonObject) -> HttpAnswer:
    """Build the answer to a request to the HTTP API from SGLang's output."""
    meta = answer["meta_info"]
    matched = meta["finish_reason"].get("matched")
    return HttpAnswer(
        build_completion(answer),
        stop_string=matched if isinstance(matched, str) else "",
        logprobs=_merge_logprobs(meta["output_token_logprobs"], meta.get("output_top_logprobs")),
        prompt_logprobs=_merge_logprobs(meta["input_token_logprobs"], meta.get("input_top_logprobs"))[1:],
    )


def _merge_logprobs(
    chosen: Sequence[tuple[float, int, Any]], top: Sequence[Sequence[tuple[float, int, Any]] | None] | None
) -> list[dict[int, float]]:
    """Return {token: log-prob} of each position: the chosen token, and the most probable ones."""
    others = [ranked or () for ranked in top or [None] * len(chosen)]
    return [
        {token: logprob for logprob, token, _ in (sampled, *ranked)}
        for sampled, ranked in zip(chosen, others, strict=True)
    ]
