"""How vLLM is set up: environment variables and engine arguments, with what each is for. Pure functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from alphaapollo.engines.spec import EngineSpec
from alphaapollo.engines.vllm import interpreted

EXTENSION = "alphaapollo.engines.vllm.extension.WorkerExtension"
SHARED_MEMORY = "shared_memory"  # our own weight transfer, registered with vLLM by the extension
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # for which vLLM has room; a smaller one is padded
RANDOM_SEED = 0  # of the engine itself: every request brings its own


def environment(spec: EngineSpec) -> dict[str, str]:
    """Environment variables of the engine's processes; they must stand before vLLM is imported and a core started."""
    variables = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CONFIGURE_LOGGING": "0",  # the log goes to spec.log_path, see process.py
        "TOKENIZERS_PARALLELISM": "false",
    }
    if spec.cleanup:
        variables["VLLM_RPC_BASE_PATH"] = sockets_folder(spec)
    if Path(spec.model_path).is_dir():
        variables["HF_HUB_OFFLINE"] = "1"
    if spec.device == "cpu":
        return variables | _cpu_environment(spec)
    if spec.transport == "ipc":
        variables["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # CUDA IPC handles are no plain data
    return variables


def sockets_folder(spec: EngineSpec) -> str:
    """Where vLLM makes its sockets: it never removes them, so they lie in what goes with the run."""
    return f"{spec.cleanup[0]}/sockets"


def _cpu_environment(spec: EngineSpec) -> dict[str, str]:
    tensor_parallel = spec.rollout.tensor_model_parallel_size
    variables = {
        "OMP_NUM_THREADS": str(spec.rollout.cpu_threads or 1),
        "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads starve the other processes: up to 30 times slower
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # The same numbers whatever else is in the batch, together with the single-row patch of patches.py.
        "VLLM_CPU_ATTN_SPLIT_KV": "0",
    }
    if tensor_parallel == 1:
        variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the model runs in the core's process, not in one more
    if spec.rollout.router_replay:
        variables |= interpreted.ENVIRONMENT
    if spec.rollout.enforce_eager:
        variables["TORCH_COMPILE_DISABLE"] = "1"  # else the first log-probs pay for a compilation
    return variables


SET_BY: dict[str, str] = {  # arguments that are not the user's, with the key that sets them
    "model": "model.path",
    "trust_remote_code": "model.trust_remote_code",
    "dtype": "rollout.dtype",
    "seed": "trainer.seed",
    "max_model_len": "data.max_prompt_length and data.max_response_length",
    "tensor_parallel_size": "rollout.tensor_model_parallel_size",
    "kv_cache_memory_bytes": "rollout.kv_cache_gib",
    "enable_sleep_mode": "rollout.free_cache_engine",
    "enable_return_routed_experts": "rollout.router_replay",
    "aux_output_config": "rollout.router_replay",
    **{
        name: f"rollout.{name}"
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "enforce_eager",
            "enable_prefix_caching",
            "block_size",
            "gpu_memory_utilization",
        )
    },
    **dict.fromkeys(
        (
            "skip_tokenizer_init",
            "generation_config",
            "logprobs_mode",
            "max_logprobs",
            "disable_log_stats",
            "worker_extension_cls",
            "weight_transfer_config",
            "enable_lora",
            "max_loras",
            "max_cpu_loras",
            "max_lora_rank",
            "enable_chunked_prefill",
            "distributed_executor_backend",
        ),
        "",
    ),
}

REPLICAS = "every replica is an engine of its own, which rollout.num_engines counts"
EXPERTS = (
    "experts are not dealt to ranks: an engine splits each of them by tensors (rollout.tensor_model_parallel_size), so "
    "that the proof of its weights counts every part once"
)
REFUSED: dict[str, str] = {  # arguments for which nothing is built here, with the reason
    "enable_expert_parallel": EXPERTS,
    "enable_eplb": EXPERTS,
    "eplb_config": EXPERTS,
    "expert_placement_strategy": EXPERTS,
    "all2all_backend": EXPERTS,
    **{
        f"data_parallel_{name}": REPLICAS
        for name in (
            "size",
            "rank",
            "start_rank",
            "size_local",
            "address",
            "rpc_port",
            "hybrid_lb",
            "external_lb",
            "multi_port_external_lb",
            "backend",
        )
    },
    "pipeline_parallel_size": "engines split a model by tensors only (rollout.tensor_model_parallel_size)",
}


def engine_arguments(spec: EngineSpec) -> dict[str, Any]:
    """Keyword arguments of vLLM's AsyncEngineArgs; the user's own come on top."""
    own = _cpu_arguments(spec) if spec.device == "cpu" else _gpu_arguments(spec)
    return _shared_arguments(spec) | _update_arguments(spec) | own | spec.rollout.engine_kwargs.vllm


def _shared_arguments(spec: EngineSpec) -> dict[str, Any]:
    rollout = spec.rollout
    return {
        "model": spec.model_path,
        "trust_remote_code": spec.trust_remote_code,
        "skip_tokenizer_init": True,  # tokens in, tokens out
        "generation_config": "vllm",  # the model folder's own sampling defaults are not asked
        "dtype": spec.dtype,
        "seed": RANDOM_SEED,
        "max_model_len": spec.max_model_len,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": max(rollout.max_num_batched_tokens, spec.max_model_len),
        "tensor_parallel_size": rollout.tensor_model_parallel_size,
        "enforce_eager": rollout.enforce_eager,
        "enable_prefix_caching": rollout.enable_prefix_caching,
        "logprobs_mode": "processed_logprobs",  # after temperature; patches.py takes them before top-p and top-k
        "max_logprobs": 1,
        "disable_log_stats": True,
        "worker_extension_cls": EXTENSION,
        "enable_return_routed_experts": rollout.router_replay,
    }


def _update_arguments(spec: EngineSpec) -> dict[str, Any]:
    """How weights come; or one adapter at a time, on the weights that the engine has loaded."""
    if spec.transport != "adapter":
        return {"weight_transfer_config": {"backend": spec.transport}}
    room = next(size for size in LORA_RANKS if size >= spec.lora_rank)
    return {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": room}


def _cpu_arguments(spec: EngineSpec) -> dict[str, Any]:
    return {
        "block_size": spec.rollout.block_size,  # vLLM's 128 would share no prefix shorter than that
        "kv_cache_memory_bytes": int(spec.rollout.kv_cache_gib * 2**30),
        "enable_chunked_prefill": False,  # with per-request seeds it kills the CPU engine
        "distributed_executor_backend": "uni" if spec.rollout.tensor_model_parallel_size == 1 else "mp",
    }


def _gpu_arguments(spec: EngineSpec) -> dict[str, Any]:
    rollout = spec.rollout
    return {
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "enable_sleep_mode": spec.shares_gpu,
        "distributed_executor_backend": "uni" if rollout.tensor_model_parallel_size == 1 else "mp",
    }
