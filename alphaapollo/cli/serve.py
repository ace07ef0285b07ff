"""Run vLLM's OpenAI server with a run's newest model: `alphaapollo serve RUN`."""

from __future__ import annotations

import argparse
import os
import pkgutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING

from alphaapollo.cli.main import make_parser
from alphaapollo.cli.subcommand import report_refusals
from alphaapollo.engines.vllm.settings import build_exclusion_flags, build_server_command, build_server_environment
from alphaapollo.observability.console import Console
from alphaapollo.processes.entry_point import MainFunction, entry_point
from alphaapollo.processes.network import find_connection_error
from alphaapollo.processes.python_command import make_subprocess_environ
from alphaapollo.processes.watchdog import kill_run_processes, new_run_id, start_reaper
from alphaapollo.runs.newest_model import RunModel, load_run_model
from alphaapollo.utils.plugins import find_plugins, load_plugin

if TYPE_CHECKING:
    from alphaapollo.launch.inference import ServePreparation

POLL_SECONDS = 0.2
EXIT_SECONDS = 3.0  # time for the server to exit after the last request


@entry_point
@report_refusals
def main(argv: Sequence[str] | None = None) -> int:
    """Run the server until it ends or is interrupted. Returns its exit code, or 2 if it cannot start."""
    options, unparsed = _parse_arguments(argv)
    host, port = options.host, options.port
    keys = [word for word in unparsed if "=" in word and not word.startswith("-")]
    socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    newest, prepared = prepare_model_for_vllm(options.run, keys)
    config, spec = prepared.config, prepared.make_engine_spec()
    exclusion = build_exclusion_flags(spec)
    name = options.name or newest.run_folder.name
    command = build_server_command(spec, name, host, port, config.env.tool_parser or None)
    command += [*exclusion, "--shutdown-timeout", str(options.shutdown_timeout)]
    command += [word for word in unparsed if word not in keys]
    url = f"http://{host}:{port}/v1"
    message = f"{newest.model_folder} as {name!r} on {url} (stop with Ctrl-C)\n  chat: vllm chat --url {url}"
    has_key = os.environ.get("VLLM_API_KEY") or any(word.startswith("--api-key") for word in unparsed)
    if host not in ("127.0.0.1", "localhost", "::1") and not has_key:
        message += "\n  warning: other machines can use it without a key. Set VLLM_API_KEY to require one."
    if config.rollout.stop_strings:
        message += f"\n  rollout.stop={config.rollout.stop} has no effect: each client sends its own `stop`"
    if config.data.system_prompt:
        message += "\n  data.system_prompt has no effect: each client sends its own system message"
    variables = build_server_environment(spec)
    return run_server(command, variables, (host, port), message, options.shutdown_timeout)


def run_server(
    command: Sequence[str], variables: dict[str, str], address: tuple[str, int], message: str, grace_seconds: float
) -> int:
    """Run a server, and print `message` as soon as it listens on `address`. Returns its exit code.

    Ctrl-C stops the server: it completes running requests for at most `grace_seconds`. A second Ctrl-C kills it.
    """
    with open_server(command, variables, address) as process:
        try:
            if process.poll() is None:
                print(message, flush=True)
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
    death of this process, kill all processes that were started meanwhile. output: file for what the server prints."""
    run_id = new_run_id()
    start_reaper(run_id, [])
    process = subprocess.Popen(
        command, env=make_subprocess_environ() | variables, stdout=output, stderr=output, start_new_session=True
    )
    try:
        while process.poll() is None and find_connection_error(*address):
            time.sleep(POLL_SECONDS)
        yield process
    finally:
        kill_run_processes(run_id)
        process.wait()


def prepare_model_for_vllm(run: str, keys: Sequence[str]) -> tuple[RunModel, ServePreparation]:
    """Find a run's newest model, and prepare its settings with the user's keys. Raises ValueError if a key selects
    another engine than vLLM."""
    from alphaapollo.launch.inference import ServePreparation  # imports torch

    if wrong_engine := [key for key in keys if key.startswith("rollout.name=") and key != "rollout.name=vllm"]:
        raise ValueError(
            f"{wrong_engine[0]}: this command uses vLLM. Remove the key. main_ppo runs suites with other engines."
        )
    newest, config = load_run_model(run, keys)
    return newest, ServePreparation(config, Console()).prepare()


def _parse_arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = make_parser(
        "serve",
        usage="alphaapollo serve RUN [--host HOST] [--port PORT] [--name NAME] [KEY=VALUE ...] [vLLM options]",
        epilog="Other options are passed to vLLM, e.g. --max-model-len 8192. Keys are main_generation's: "
        "rollout.kv_cache_gib (CPU), rollout.gpu_memory_utilization, rollout.tensor_model_parallel_size, "
        "rollout.cpu_threads, trainer.device. Set the environment variable VLLM_API_KEY to require an API key.",
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


@entry_point
@report_refusals
def evaluate(argv: Sequence[str] | None = None) -> int:
    """Call main_eval, or the evaluation that a plug-in adds for a given option, e.g. --suite. Returns 0 if done, 1 if
    failed, 2 if refused."""
    words = argv or []
    argument_names = {word.partition("=")[0] for word in words}
    option = next((name for name in find_plugins("evaluations") if f"--{name}" in argument_names), "")
    run: MainFunction = load_plugin("evaluations", option) or pkgutil.resolve_name("alphaapollo.trainer.main_eval:main")
    return run(words)
