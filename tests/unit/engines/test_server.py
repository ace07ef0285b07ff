from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from alphaapollo.config.schema import Rollout
from alphaapollo.engines.protocol import EngineSpec
from alphaapollo.engines.vllm.settings import (
    build_exclusion_flags,
    build_server_command,
    build_server_environment,
    format_flags,
)
from tests.unit.rollout.agents.agents_kit import CONFIG, write_model


def spec(device: str, **settings: object) -> EngineSpec:
    defaults = {"enforce_eager": True, "cpu_threads": 2, "max_num_seqs": 256, "gpu_memory_utilization": 0.9}
    rollout = Rollout(**defaults | settings)  # type: ignore[arg-type]
    return EngineSpec(0, "/model", False, rollout, device, "float32", 300, "")  # type: ignore[arg-type]


def pairs(words: list[str]) -> dict[str, str]:
    return {word: after for word, after in zip(words, [*words[1:], ""], strict=True) if word.startswith("--")}


def test_cpu_server_has_engine_settings() -> None:
    words = build_server_command(spec("cpu"), "first", "127.0.0.1", 8000)
    given = pairs(words)
    assert words[1:5] == ["-m", "vllm.entrypoints.launchers.api_server.entry", "--model", "/model"]
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


def test_the_server_excludes_tokens_that_the_tokenizer_lacks(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    path = str(write_model(tmp_path))
    own = replace(spec("cpu"), model_path=path)
    excluded = [*own.find_excluded_ids()]
    flag, name = build_exclusion_flags(own)
    assert flag == "--logits-processors" and excluded
    from vllm.v1.sample.logits_processor import _load_custom_logitsprocs

    (kind,) = _load_custom_logitsprocs([name])
    model = SimpleNamespace(model=path, tokenizer=path, trust_remote_code=False)
    processor = kind(SimpleNamespace(model_config=model), torch.device("cpu"), False)
    logits = processor.apply(torch.zeros(2, CONFIG["vocab_size"]))
    assert (logits < -1e8).nonzero()[:, 1].tolist() == excluded * 2
