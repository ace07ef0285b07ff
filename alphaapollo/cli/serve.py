"""Run vLLM's OpenAI server with a run's newest model: `alphaapollo serve RUN`, and `alphaapollo eval RUN --suite ...`
for evaluation suites."""

from __future__ import annotations

import argparse
import asyncio
import os
import pkgutil
import secrets
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

from alphaapollo.cli.subcommand import report_refusals
from alphaapollo.config.errors import report_error
from alphaapollo.config.schema import GenerationConfig
from alphaapollo.engines.types import EngineSpec
from alphaapollo.engines.vllm.settings import build_exclusion_flags, build_server_command, build_server_environment
from alphaapollo.observability.console import Console
from alphaapollo.processes.entry_point import MainFunction, entry_point
from alphaapollo.processes.network import find_connection_error, find_free_port
from alphaapollo.processes.python_command import make_subprocess_environ
from alphaapollo.processes.watchdog import kill_run_processes, new_run_id, start_reaper
from alphaapollo.rollout.suites import FOLDER, ModelServer, Suite, check_suites, run_suite
from alphaapollo.runs.newest_model import RunModel, load_run_model
from alphaapollo.utils.redaction import replace_control_characters

if TYPE_CHECKING:
    from alphaapollo.session.inference import InferencePreparation, ServePreparation

DEFAULT_CONTEXT = 4096  # context length in tokens, if the model supports it
POLL_SECONDS = 0.2
EXIT_SECONDS = 3.0  # for the server to exit after the last request


@entry_point
@report_refusals
def main(argv: Sequence[str] | None = None) -> int:
    """Run the server until it ends or is interrupted. Returns its exit code, or 2 if it cannot start."""
    options, more = _parse_arguments(argv)
    host, port = options.host, options.port
    keys = [word for word in more if "=" in word and not word.startswith("-")]
    socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    newest, prepared = _prepare_model_for_vllm(options.run, keys)
    config, spec = prepared.config, make_engine_spec(prepared)
    exclusion = build_exclusion_flags(spec)
    name = options.name or newest.run_folder.name
    command = build_server_command(spec, name, host, port, config.env.tool_parser or None)
    command += [*exclusion, "--shutdown-timeout", str(options.shutdown_timeout)]
    command += [word for word in more if word not in keys]
    url = f"http://{host}:{port}/v1"
    message = f"{newest.model_folder} as {name!r} on {url} (stop with Ctrl-C)\n  chat: vllm chat --url {url}"
    has_key = os.environ.get("VLLM_API_KEY") or any(word.startswith("--api-key") for word in more)
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


def _prepare_model_for_vllm(run: str, keys: Sequence[str]) -> tuple[RunModel, ServePreparation]:
    """Find a run's newest model, and prepare its settings with further keys. Raises ValueError for a key of other
    engines."""
    from alphaapollo.session.inference import ServePreparation  # imports torch

    if other := [key for key in keys if key.startswith("rollout.name=") and key != "rollout.name=vllm"]:
        raise ValueError(
            f"{other[0]}: this command uses vLLM. Remove the key. main_ppo runs suites with other engines."
        )
    newest, config = load_run_model(run, keys)
    return newest, ServePreparation(config, Console()).prepare()


def make_engine_spec(prepared: InferencePreparation) -> EngineSpec:
    """Return the settings of an engine on this machine. Raises ValueError if the model cannot be read."""
    config = prepared.config
    return EngineSpec(
        index=0,
        model_path=config.model.path,
        trust_remote_code=config.model.trust_remote_code,
        rollout=prepared.rollout,
        device=prepared.device,
        dtype=prepared.rollout.dtype,
        max_model_len=choose_context_length(config),
        log_path="",
    )


def choose_context_length(config: GenerationConfig) -> int:
    """Return the tokens of a conversation: DEFAULT_CONTEXT or those of the run, at most the model's positions."""
    from alphaapollo.models.load import load_config

    length = max(config.data.max_length, DEFAULT_CONTEXT)
    return min(getattr(load_config(config.model).get_text_config(), "max_position_embeddings", length), length)


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


@entry_point
@report_refusals
def evaluate(argv: Sequence[str] | None = None) -> int:
    """Call main_eval or, with --suite, run evaluation suites. Returns 0 if done, 1 if failed, 2 if refused."""
    words = argv or []
    if not any(word.partition("=")[0] == "--suite" for word in words):
        score_responses: MainFunction = pkgutil.resolve_name("alphaapollo.trainer.main_eval:main")
        return score_responses(words)
    options = _parse_suite_arguments(words)
    suites = [Suite(text, options.python, options.timeout) for text in options.suite]
    check_suites(suites)
    newest, prepared = _prepare_model_for_vllm(options.run, options.keys)
    spec = make_engine_spec(prepared)
    folder = find_results_folder(newest)
    log, host, port, key = folder / "server.txt", "127.0.0.1", find_free_port(), secrets.token_urlsafe()
    server = ModelServer(f"http://{host}:{port}/v1", key, "model", spec.model_path, spec.max_model_len)
    command = build_server_command(spec, server.model_name, host, port)
    variables = build_server_environment(spec) | {"VLLM_API_KEY": key}
    failed = False
    folder.mkdir(parents=True, exist_ok=True)
    print(f"starting vLLM with {newest.model_folder} (log: {log})", flush=True)
    with log.open("wb") as output, open_server(command, variables, (host, port), output) as process:
        if process.poll() is not None:
            return report_error(ChildProcessError(f"vLLM ended with exit code {process.returncode}. See {log}."), 1)
        for suite in suites:
            print(f"{suite.text} (results: {folder / suite.name})", flush=True)
            result = asyncio.run(run_suite(suite, server, folder / suite.name))
            for score in result.scores:
                error = f"standard error {score.stderr}, {score.rows} rows"
                print(f"  {score.task} {score.metric} {score.value:.4f} ({error})")
            if result.error:
                print(replace_control_characters(f"  failed: {result.error}"), flush=True)
            failed |= bool(result.error)
    return int(failed)


def find_results_folder(newest: RunModel) -> Path:
    """Return the folder for the results of suites: in the model's run, or in outputs/ for a model of no run."""
    parent = Path("outputs") if newest.run_folder == newest.model_folder else newest.run_folder
    return parent / FOLDER / newest.model_folder.name


def _parse_suite_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="alphaapollo eval",
        description="Run tasks of lm-eval and inspect-ai on a run's newest model, which vLLM serves meanwhile "
        "(docs/evaluation.md#evaluation-suites).",
    )
    parser.add_argument("run", metavar="RUN", help="a run's folder, one of its checkpoints, or a model's folder")
    parser.add_argument("keys", metavar="KEY=VALUE", nargs="*", help="keys of main_generation")
    suite_help = "lm-eval:TASK or inspect:FILE.py@TASK, and options of its own command: 'lm-eval:gsm8k --limit 100'"
    parser.add_argument("--suite", action="append", help=f"{suite_help}; may be repeated")
    parser.add_argument("--python", default="", help="Python of an environment with the suites' packages")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds after which a suite is ended")
    return parser.parse_intermixed_args(argv)
