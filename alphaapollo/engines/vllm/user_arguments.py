"""Validate the vLLM engine arguments that a user sets with engine_kwargs.vllm."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

from alphaapollo.config.schema import Rollout
from alphaapollo.utils.registry import suggest_similar

_RESERVED = {  # reason -> arguments of vLLM
    "is set by {rollout}.{name}": """
        dtype max_num_seqs max_num_batched_tokens enforce_eager enable_prefix_caching block_size gpu_memory_utilization
    """,
    "is set by {rollout}.tensor_model_parallel_size": "tensor_parallel_size",
    "is set by {rollout}.kv_cache_gib": "kv_cache_memory_bytes",
    "is set by {rollout}.free_cache_engine": "enable_sleep_mode sleep_mode_offload_cudagraph",
    "is set by {rollout}.router_replay": "enable_return_routed_experts aux_output_config",
    "is set by {model}.path": "model",
    "is set by {model}.tokenizer_path": "tokenizer",
    "is set by {model}.trust_remote_code": "trust_remote_code",
    "is set by data.max_prompt_length and data.max_response_length": "max_model_len",
    "is set by the project": """
        seed skip_tokenizer_init generation_config logprobs_mode max_logprobs disable_log_stats worker_extension_cls
        weight_transfer_config enable_lora max_loras max_cpu_loras max_lora_rank enable_chunked_prefill
        distributed_executor_backend limit_mm_per_prompt mm_processor_cache_gb mm_device_do_normalize skip_mm_profiling
    """,
    "is replaced by the number of replicas, {rollout}.num_engines": """
        data_parallel_size data_parallel_rank data_parallel_start_rank data_parallel_size_local data_parallel_address
        data_parallel_rpc_port data_parallel_hybrid_lb data_parallel_external_lb data_parallel_multi_port_external_lb
        data_parallel_backend
    """,
    "is set by {rollout}.expert_parallel_size": "enable_expert_parallel",
    "is not supported, only {rollout}.expert_parallel_size": """
        enable_eplb eplb_config expert_placement_strategy all2all_backend
    """,
    "is not supported, only tensor parallelism ({rollout}.tensor_model_parallel_size)": "pipeline_parallel_size",
}
RESERVED_ARGUMENTS = {name: reason for reason, names in _RESERVED.items() for name in names.split()}


def check_engine_kwargs(rollout: Rollout, section: str) -> None:
    """Raise ValueError if engine_kwargs.vllm has an argument that vLLM does not have or that another config key sets.

    section: config section of these settings, `rollout` or `actor_rollout_ref.rollout`.
    """
    user_kwargs, key = rollout.engine_kwargs.vllm, f"{section}.engine_kwargs.vllm"
    if not user_kwargs or rollout.name != "vllm":
        return
    for name in user_kwargs:
        if name in RESERVED_ARGUMENTS:
            model = section.removesuffix("rollout") + "model"
            reason = RESERVED_ARGUMENTS[name].format(name=name, rollout=section, model=model)
            raise ValueError(f"{key}.{name} cannot be set, because it {reason}. Remove it.")
    # Use a subprocess, because importing vLLM takes memory and fixes its settings.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        known = process.submit(list_vllm_arguments).result()
    for name in user_kwargs:
        if name not in known:
            raise ValueError(
                f"{key}.{name} is not an argument of vLLM's EngineArgs.{suggest_similar(name, sorted(known), 3)} "
                f"Correct the argument's name, or remove {key}.{name}."
            )


def list_vllm_arguments() -> set[str]:
    """Return the argument names of vLLM's AsyncEngineArgs."""
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    from dataclasses import fields

    from vllm.engine.arg_utils import AsyncEngineArgs

    return {field.name for field in fields(AsyncEngineArgs)}
