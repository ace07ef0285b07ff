"""`alphaapollo serve RUN`: this process becomes vLLM's own OpenAI server on the run's newest model."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from alphaapollo.cli.run_folder import model_to_play
from alphaapollo.config.errors import exit_on_config_error, report_error
from alphaapollo.config.schema import GenerationConfig

if TYPE_CHECKING:
    from alphaapollo.engines.spec import EngineSpec

USUAL_LENGTH = 4096  # tokens of a chat, where the model has positions for them


def main(argv: Sequence[str] | None = None) -> int:
    """Does not return where the server starts. 2: refused."""
    options, more = _parse(argv)
    keys = [one for one in more if _is_key(one)]
    with exit_on_config_error():
        newest, config = model_to_play(options.run, keys)
        from alphaapollo.engines.vllm.server import server_command, server_variables

        try:
            spec = server_spec(config)
        except ValueError as error:
            return report_error(error, 2)
    name = options.name or newest.run.name
    command = server_command(spec, name, options.host, options.port, config.env.tool_parser or None)
    command += [one for one in more if not _is_key(one)]
    print(
        f"{newest.folder} as {name!r} on http://{options.host}:{options.port}/v1 (vLLM's OpenAI server; Ctrl-C ends it)"
    )
    print(f"  talk to it: alphaapollo chat --url http://{options.host}:{options.port}/v1", flush=True)
    return becomes(command, os.environ | server_variables(spec))


def becomes(command: list[str], variables: dict[str, str]) -> NoReturn:
    """This process, from here on."""
    os.execve(command[0], command, variables)


def server_spec(config: GenerationConfig) -> EngineSpec:
    """As our engine would be built for this machine. ValueError: a model that cannot be read."""
    from alphaapollo.config.resolve import engine_threads, resolve_device, resolve_rollout
    from alphaapollo.controller.placement import detect_machine
    from alphaapollo.engines.spec import EngineSpec
    from alphaapollo.models.load import load_config

    machine = detect_machine()
    device = resolve_device(config.trainer.device, machine.num_gpus)
    rollout = resolve_rollout(config.rollout, config.model, device, config.trainer.num_gpus)
    threads = engine_threads(rollout, machine.num_cores, nnodes=1, own_cores=False)
    positions = getattr(load_config(config.model).get_text_config(), "max_position_embeddings", USUAL_LENGTH)
    trained = config.data.max_prompt_length + config.data.max_response_length
    return EngineSpec(
        index=0,
        model_path=config.model.path,
        trust_remote_code=config.model.trust_remote_code,
        rollout=rollout.model_copy(update={"cpu_threads": threads, "free_cache_engine": False}),
        device=device,
        dtype=rollout.dtype,
        max_model_len=min(positions, max(trained, USUAL_LENGTH)),
        log_path="",
    )


def _is_key(one: str) -> bool:
    return "=" in one and not one.startswith("-")


def _parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="alphaapollo serve",
        usage="alphaapollo serve RUN [--host HOST] [--port PORT] [--name NAME] [KEY=VALUE ...] [vLLM's own options]",
        description="Starts vLLM's OpenAI server on a run's newest model, on GPUs or on the CPU. A checkpoint that is "
        "newer than the run's model is exported first. Other options go to vLLM as they are: --max-model-len 8192.",
        epilog="keys are main_generation's: rollout.kv_cache_gib (CPU), rollout.gpu_memory_utilization, "
        "rollout.tensor_model_parallel_size, rollout.cpu_threads, trainer.device. A key that clients must give is the "
        "environment variable VLLM_API_KEY.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="a run's folder, one of its checkpoints, or a model's folder")
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (default 127.0.0.1: this machine alone)")
    parser.add_argument("--port", type=int, default=8000, help="(default 8000)")
    parser.add_argument("--name", help="of the model, for clients (default: the run's name)")
    return parser.parse_known_args(argv)
