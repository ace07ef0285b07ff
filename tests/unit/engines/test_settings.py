"""vLLM's environment variables, engine arguments and server command. The value `...` means that a key is absent."""

from __future__ import annotations

import pkgutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from alphaapollo.config.schema import EngineKwargs
from alphaapollo.engines.vllm import settings as vllm
from tests.unit.engines.specs import check_items, make_spec
from tests.unit.rollout.agents.agents_kit import CONFIG, write_model

INSECURE = "VLLM_ALLOW_INSECURE_SERIALIZATION"
ADAPTER = {"transport": "adapter", "lora_rank": 12}
EXPERTS = {"tensor_model_parallel_size": 2, "expert_parallel_size": 2}


@pytest.mark.parametrize(
    ("device", "settings", "expected"),
    [
        ("cpu", {}, {"kv_cache_memory_bytes": 2**29, "block_size": 32, "enable_chunked_prefill": False}),
        ("cpu", {}, {"max_model_len": 300, "max_num_batched_tokens": 8192}),
        ("cpu", {}, {"weight_transfer_config": {"backend": "shared_memory"}}),
        ("cpu", {"max_num_batched_tokens": 64}, {"max_num_batched_tokens": 300}),  # holds one sequence
        ("cuda", {}, {"gpu_memory_utilization": 0.5, "max_cudagraph_capture_size": 256, "moe_backend": "triton"}),
        ("cuda", {}, {"enable_sleep_mode": True, "enable_expert_parallel": False, "block_size": ...}),
        ("cuda", {"enforce_eager": True}, {"max_cudagraph_capture_size": ...}),
        ("cuda", EXPERTS, {"enable_expert_parallel": True}),
        ("cuda", {"transport": "nccl"}, {"weight_transfer_config": {"backend": "nccl"}}),
        ("cuda", ADAPTER, {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16, "weight_transfer_config": ...}),
        ("cpu", ADAPTER | {"max_loras": 4}, {"max_loras": 4, "max_cpu_loras": 16}),
    ],
)
def test_engine_arguments(device: str, settings: dict[str, Any], expected: dict[str, Any]) -> None:
    check_items(vllm.build_engine_arguments(make_spec(device, **settings)), expected)


@pytest.mark.parametrize(
    ("device", "settings", "expected"),
    [
        ("cpu", {}, {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}),
        ("cpu", {}, {"VLLM_CPU_ATTN_SPLIT_KV": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}),
        ("cpu", {}, {"TORCH_COMPILE_DISABLE": "1", "HF_HUB_OFFLINE": ...}),  # a hub id may still have to be fetched
        ("cpu", {"cpu_threads": 3, "enforce_eager": False}, {"OMP_NUM_THREADS": "3", "TORCH_COMPILE_DISABLE": ...}),
        ("cpu", {"tensor_model_parallel_size": 2}, {"VLLM_ENABLE_V1_MULTIPROCESSING": ...}),  # a process a rank
        ("cuda", {"full_determinism": True}, {"VLLM_BATCH_INVARIANT": "1"}),
        ("cuda", {"transport": "ipc"}, {INSECURE: "1", "VLLM_BATCH_INVARIANT": ..., "OMP_NUM_THREADS": ...}),
        ("cuda", {"model_path": "/"}, {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", INSECURE: ...}),
    ],
)
def test_environment_variables(device: str, settings: dict[str, Any], expected: dict[str, Any]) -> None:
    variables = vllm.build_vllm_environment(make_spec(device, **settings))
    check_items(variables, expected | {"VLLM_NO_USAGE_STATS": "1", "VLLM_CONFIGURE_LOGGING": "0"})


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_user_arguments_reach_the_engine(device: str) -> None:
    plain = vllm.build_engine_arguments(make_spec(device))
    user = {"max_cudagraph_capture_size": 64, "hf_overrides": {"a": 1}}
    assert vllm.build_engine_arguments(make_spec(device, engine_kwargs=EngineKwargs(vllm=user))) == plain | user
    assert {*plain} <= vllm.RESERVED_ARGUMENTS | {"max_cudagraph_capture_size"}  # others are refused


def test_vllm_knows_all_reserved_arguments() -> None:
    arguments = pytest.importorskip("vllm.engine.arg_utils").AsyncEngineArgs
    assert set(arguments.__dataclass_fields__) >= vllm.RESERVED_ARGUMENTS


def flags(words: list[str]) -> dict[str, str]:
    return {word: after for word, after in zip(words, [*words[1:], ""], strict=True) if word.startswith("--")}


GRAPHS = EngineKwargs(vllm={"max_cudagraph_capture_size": 64})
OF_ENGINES = ("--skip-tokenizer-init", "--worker-extension-cls", "--weight-transfer-config", "--seed")


def test_server_command() -> None:
    words = vllm.build_server_command(make_spec(model_path="/model"), "first", "127.0.0.1", 8000)
    assert words[1:6] == ["-P", "-m", "vllm.entrypoints.launchers.api_server.entry", "--model", "/model"]
    found = flags(words)
    assert callable(pkgutil.resolve_name(found["--middleware"]))
    check_items(found, {"--served-model-name": "first", "--port": "8000", "--max-model-len": "300"})
    check_items(found, {"--dtype": "float32", "--block-size": "32", "--kv-cache-memory-bytes": str(2**29)})
    assert {"--no-enable-chunked-prefill", "--enforce-eager"} <= {*found} and not {*OF_ENGINES} & {*found}
    spec = make_spec("cuda", gpu_memory_utilization=0.9, engine_kwargs=GRAPHS)
    found = flags(vllm.build_server_command(spec, "m", "0.0.0.0", 80, "hermes"))
    check_items(found, {"--gpu-memory-utilization": "0.9", "--max-cudagraph-capture-size": "64", "--block-size": ...})
    check_items(found, {"--tool-call-parser": "hermes", "--host": "0.0.0.0", "--enable-sleep-mode": ...})
    assert "--enable-auto-tool-choice" in found
    assert vllm.format_flags({"a_b": True, "c_d": False, "f": {"g": 1}}) == ["--a-b", "--no-c-d", "--f", '{"g": 1}']
    variables = vllm.build_server_environment(make_spec(cpu_threads=2))  # its log is shown
    check_items(variables, {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE", "VLLM_CONFIGURE_LOGGING": ...})


def test_the_server_excludes_tokens_that_the_tokenizer_lacks(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    path = str(write_model(tmp_path))
    spec = make_spec(model_path=path)
    excluded = [*spec.find_excluded_ids()]
    flag, name = vllm.build_exclusion_flags(spec)
    assert flag == "--logits-processors" and excluded
    from vllm.v1.sample.logits_processor import _load_custom_logitsprocs

    (kind,) = _load_custom_logitsprocs([name])
    model = SimpleNamespace(model=path, tokenizer=path, trust_remote_code=False)
    processor = kind(SimpleNamespace(model_config=model), torch.device("cpu"), False)
    logits = processor.apply(torch.zeros(2, CONFIG["vocab_size"]))
    assert (logits < -1e8).nonzero()[:, 1].tolist() == excluded * 2
