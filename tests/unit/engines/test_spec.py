from dataclasses import replace

import pytest

from alphaapollo.config.schema import Rollout
from alphaapollo.engines.factory import make_engine
from alphaapollo.engines.protocol import EngineSpec
from alphaapollo.engines.vllm.settings import build_engine_arguments, build_vllm_environment


def spec(device="cpu", path="org/model", transport="shared_memory", **rollout) -> EngineSpec:
    # as config/resolve.py and the memory plan choose
    rollout = {"enforce_eager": device == "cpu", "max_num_seqs": 256, "gpu_memory_utilization": 0.5} | rollout
    return EngineSpec(1, path, False, Rollout(**rollout), device, "float32", 300, "engine.log", transport)


def test_cpu_settings():
    variables, arguments = build_vllm_environment(spec()), build_engine_arguments(spec())
    assert variables["OMP_WAIT_POLICY"] == "PASSIVE" and variables["OMP_NUM_THREADS"] == "1"
    assert variables["VLLM_CPU_OMP_THREADS_BIND"] == "nobind" and variables["VLLM_CPU_ATTN_SPLIT_KV"] == "0"
    assert variables["TORCH_COMPILE_DISABLE"] == "1" and variables["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert "HF_HUB_OFFLINE" not in variables  # a hub id may still have to be fetched
    assert arguments["kv_cache_memory_bytes"] == 2**29 and arguments["block_size"] == 32
    assert arguments["enable_chunked_prefill"] is False
    assert arguments["max_model_len"] == 300 and arguments["max_num_batched_tokens"] == 8192
    assert arguments["weight_transfer_config"] == {"backend": "shared_memory"}
    assert build_vllm_environment(spec(cpu_threads=3))["OMP_NUM_THREADS"] == "3"


def test_token_budget_of_a_step_holds_one_sequence():
    assert build_engine_arguments(spec(max_num_batched_tokens=64))["max_num_batched_tokens"] == 300


def test_cpu_tensor_parallel_is_a_process_a_rank():
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in build_vllm_environment(spec(tensor_model_parallel_size=2))
    assert build_engine_arguments(spec(tensor_model_parallel_size=2))["distributed_executor_backend"] == "mp"


def test_gpus_of_an_engine_have_complete_experts_with_expert_parallelism() -> None:
    for size in (1, 2):
        arguments = build_engine_arguments(spec("cuda", tensor_model_parallel_size=2, expert_parallel_size=size))
        assert arguments["enable_expert_parallel"] == (size == 2)


def test_gpu_settings(tmp_path):
    colocated, apart = build_engine_arguments(spec("cuda")), build_engine_arguments(spec("cuda", colocate=False))
    assert colocated["enable_sleep_mode"] and not apart["enable_sleep_mode"]
    assert not build_engine_arguments(spec("cuda", free_cache_engine=False))["enable_sleep_mode"]
    assert colocated["max_cudagraph_capture_size"] == 256 and colocated["moe_backend"] == "triton"
    assert "max_cudagraph_capture_size" not in build_engine_arguments(spec("cuda", enforce_eager=True))
    assert build_vllm_environment(spec("cuda", full_determinism=True))["VLLM_BATCH_INVARIANT"] == "1"
    assert colocated["gpu_memory_utilization"] == 0.5 and "block_size" not in colocated
    assert build_vllm_environment(spec("cuda", path=str(tmp_path), transport="ipc")) == {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CONFIGURE_LOGGING": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    }
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in build_vllm_environment(spec("cuda"))
    assert build_engine_arguments(spec("cuda", transport="nccl"))["weight_transfer_config"] == {"backend": "nccl"}


def test_adapter_engine_holds_one_adapter():
    arguments = build_engine_arguments(replace(spec("cuda", transport="adapter"), lora_rank=12))
    assert (arguments["enable_lora"], arguments["max_loras"], arguments["max_lora_rank"]) == (True, 1, 16)
    assert "weight_transfer_config" not in arguments
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in build_vllm_environment(spec("cuda", colocate=False))


def test_a_fake_engine_needs_a_local_folder():
    with pytest.raises(ValueError, match=r"org/model has no config\.json"):
        make_engine(spec(name="fake"))
