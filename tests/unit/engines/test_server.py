from __future__ import annotations

from alphaapollo.config.schema import Rollout
from alphaapollo.engines.spec import EngineSpec
from alphaapollo.engines.vllm.settings import build_server_command, build_server_environment, format_flags


def spec(device: str, **settings: object) -> EngineSpec:
    defaults = {"enforce_eager": True, "cpu_threads": 2, "max_num_seqs": 256, "gpu_memory_utilization": 0.9}
    rollout = Rollout(**defaults | settings)  # type: ignore[arg-type]
    return EngineSpec(0, "/model", False, rollout, device, "float32", 300, "")  # type: ignore[arg-type]


def pairs(words: list[str]) -> dict[str, str]:
    return {word: after for word, after in zip(words, [*words[1:], ""], strict=True) if word.startswith("--")}


def test_cpu_server_has_engine_settings() -> None:
    words = build_server_command(spec("cpu"), "first", "127.0.0.1", 8000)
    given = pairs(words)
    assert words[1:5] == ["-m", "vllm.entrypoints.openai.api_server", "--model", "/model"]
    assert (given["--served-model-name"], given["--port"]) == ("first", "8000")
    assert (given["--max-model-len"], given["--dtype"], given["--block-size"]) == ("300", "float32", "32")
    assert given["--kv-cache-memory-bytes"] == str(2**29)
    assert {"--no-enable-chunked-prefill", "--enforce-eager"} <= set(words)
    assert not {"--skip-tokenizer-init", "--worker-extension-cls", "--weight-transfer-config", "--seed"} & set(words)
    variables = build_server_environment(spec("cpu"))
    assert (variables["OMP_NUM_THREADS"], variables["OMP_WAIT_POLICY"]) == ("2", "PASSIVE")
    assert "VLLM_CONFIGURE_LOGGING" not in variables  # its log is shown


def test_gpu_server() -> None:
    kwargs = {"vllm": {"max_cudagraph_capture_size": 64}}
    words = build_server_command(spec("cuda", engine_kwargs=kwargs), "m", "0.0.0.0", 80, "hermes")
    given = pairs(words)
    assert (given["--gpu-memory-utilization"], given["--max-cudagraph-capture-size"]) == ("0.9", "64")
    assert (given["--tool-call-parser"], given["--host"]) == ("hermes", "0.0.0.0")
    assert "--enable-auto-tool-choice" in words and not {"--block-size", "--enable-sleep-mode"} & set(words)


def test_flags() -> None:
    flags = format_flags({"a_b": True, "c_d": False, "e": 3, "f": {"g": 1}})
    assert flags == ["--a-b", "--no-c-d", "--e", "3", "--f", '{"g": 1}']
