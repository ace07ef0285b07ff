"""`alphaapollo serve RUN`: run vLLM's OpenAI server with the run's newest model."""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING

from alphaapollo.config.errors import ConfigError, exit_on_config_error, report_error
from alphaapollo.config.schema import GenerationConfig
from alphaapollo.processes.entry_point import entry_point
from alphaapollo.processes.network import find_connection_error
from alphaapollo.processes.watchdog import kill_run_processes, new_run_id, start_reaper
from alphaapollo.runs.run_model import load_run_model

if TYPE_CHECKING:
    from alphaapollo.engines.protocol import EngineSpec

DEFAULT_CONTEXT = 4096  # context length in tokens, if the model supports it
POLL_SECONDS = 0.2
EXIT_SECONDS = 3.0  # for the server to exit after the last request


@entry_point
def main(argv: Sequence[str] | None = None) -> int:
    """Run the server until it ends or is interrupted. Returns its exit code, or 2 if the run, the port, a key or the
    model cannot be used."""
    options, more = _parse_arguments(argv)
    keys = [word for word in more if _is_override(word)]
    with exit_on_config_error():
        check_address(options.host, options.port)
        newest, config = load_run_model(options.run, keys)
        from alphaapollo.engines.vllm.settings import (
            build_exclusion_flags,
            build_server_command,
            build_server_environment,
        )

        try:
            spec = make_engine_spec(config)
            exclusion = build_exclusion_flags(spec)
        except ValueError as error:
            return report_error(error, 2)
    name = options.name or newest.run_folder.name
    command = build_server_command(spec, name, options.host, options.port, config.env.tool_parser or None)
    command += [*exclusion, "--shutdown-timeout", str(options.shutdown_timeout)]
    command += [word for word in more if not _is_override(word)]
    url = f"http://{options.host}:{options.port}/v1"
    message = f"{newest.model_folder} as {name!r} on {url} (stop with Ctrl-C)\n  chat: alphaapollo chat --url {url}"
    has_key = os.environ.get("VLLM_API_KEY") or any(word.startswith("--api-key") for word in more)
    if options.host not in ("127.0.0.1", "localhost", "::1") and not has_key:
        message += "\n  warning: other machines can use it without a key. Set VLLM_API_KEY to require one."
    if config.rollout.stop_strings:
        message += f"\n  rollout.stop={config.rollout.stop} has no effect: each client sends its own `stop`"
    variables = build_server_environment(spec)
    return run_server(command, variables, (options.host, options.port), message, options.shutdown_timeout)


def check_address(host: str, port: int) -> None:
    """Raise ConfigError if a server cannot listen on the address."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--host {host} --port {port}: {error}. Use another --port, e.g. {port + 1}.") from None


def run_server(
    command: Sequence[str], variables: dict[str, str], address: tuple[str, int], message: str, grace_seconds: float
) -> int:
    """Run a server until it ends, and return its exit code. Print `message` as soon as it listens on `address`.

    variables: Environment variables of the server, added to those of this process.

    Ctrl-C stops the server: it completes running requests for at most `grace_seconds`. A second Ctrl-C, or the death
    of this process, kills its processes at once.
    """
    with open_server(command, variables, address) as process:
        if process.poll() is None:
            print(message, flush=True)
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(grace_seconds + EXIT_SECONDS)
            raise


@contextmanager
def open_server(
    command: Sequence[str], variables: dict[str, str], address: tuple[str, int], output: IO[bytes] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Context manager that starts a server, and waits until it listens on `address` or has ended. At the end, or at the
    death of this process, kill all processes that were started meanwhile.

    output: file for what the server prints; None: this process's output.
    """
    run_id = new_run_id()
    start_reaper(run_id, [])
    process = subprocess.Popen(
        command, env=os.environ | variables, stdout=output, stderr=output, start_new_session=True
    )
    try:
        while process.poll() is None and find_connection_error(*address):
            time.sleep(POLL_SECONDS)
        yield process
    finally:
        kill_run_processes(run_id)
        process.wait()


def make_engine_spec(config: GenerationConfig) -> EngineSpec:
    """Return the settings of a vLLM engine on this machine. Raises ValueError if the model cannot be read."""
    from alphaapollo.config.resolve import resolve_generation
    from alphaapollo.controller.placement import detect_machine
    from alphaapollo.engines.protocol import EngineSpec

    machine = detect_machine()
    device, rollout = resolve_generation(config, machine.num_gpus, machine.num_cores)
    return EngineSpec(
        index=0,
        model_path=config.model.path,
        trust_remote_code=config.model.trust_remote_code,
        rollout=rollout,
        device=device,
        dtype=rollout.dtype,
        max_model_len=choose_context_length(config),
        log_path="",
    )


def choose_context_length(config: GenerationConfig) -> int:
    """Return the tokens of a conversation: DEFAULT_CONTEXT or those of the run, at most the model's positions."""
    from alphaapollo.models.load import load_config

    length = max(config.data.max_length, DEFAULT_CONTEXT)
    return min(getattr(load_config(config.model).get_text_config(), "max_position_embeddings", length), length)


def _is_override(word: str) -> bool:
    return "=" in word and not word.startswith("-")


def _parse_arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="alphaapollo serve",
        usage="alphaapollo serve RUN [--host HOST] [--port PORT] [--name NAME] [KEY=VALUE ...] [vLLM options]",
        description="Start vLLM's OpenAI server with a run's newest model, on GPUs or on the CPU. A newer checkpoint "
        "is exported first. Other options are passed to vLLM, e.g. --max-model-len 8192.",
        epilog="keys are main_generation's: rollout.kv_cache_gib (CPU), rollout.gpu_memory_utilization, "
        "rollout.tensor_model_parallel_size, rollout.cpu_threads, trainer.device. Set the environment variable "
        "VLLM_API_KEY to require an API key.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="a run's folder, one of its checkpoints, or a model's folder")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1: this machine only)"
    )
    parser.add_argument("--port", type=int, default=8000, help="port to listen on (default 8000)")
    parser.add_argument("--name", help="model name for clients (default: the run's name)")
    parser.add_argument(
        "--shutdown-timeout", type=int, default=5, help="seconds that running requests get after Ctrl-C (default 5)"
    )
    return parser.parse_known_args(argv)
