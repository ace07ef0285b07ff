"""`alphaapollo tinker MODEL`: serve a base model to clients of `tinker`, each of which trains its own LoRA adapters."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import uvicorn

from alphaapollo.cli.main import make_parser
from alphaapollo.config.errors import report_error
from alphaapollo.config.schema import Config
from alphaapollo.controller.errors import REPORTED_ERRORS
from alphaapollo.data.rendering import Renderer
from alphaapollo.data.vocabulary import find_stop_ids, load_tokenizer
from alphaapollo.models.load import load_config
from alphaapollo.own_loop.setup import load_loop_config
from alphaapollo.own_loop.trainer import Trainer
from alphaapollo.plugins.tinker.app import build_app
from alphaapollo.plugins.tinker.calls import Futures
from alphaapollo.plugins.tinker.server import ServedModel, Server
from alphaapollo.plugins.tinker.store import CheckpointStore
from alphaapollo.processes.entry_point import entry_point
from alphaapollo.processes.folder_lock import lock_folder
from alphaapollo.processes.network import LOOPBACK, list_trusted_hosts

CONTEXT = 4096  # tokens of prompt and answer, if the model supports them
POLL_SECONDS = 2.0  # between two checks for silent sessions and for the end of the workers
DEFAULTS = {
    "trainer.project_name": "tinker",
    "trainer.experiment_name": "server",
    "trainer.resume_mode": "disable",  # clients continue from their own checkpoints
    "lora_rank": 32,
    "rollout.lora": "adapter",
    "rollout.temperature": 1.0,
    "rollout.max_loras": 8,
}
LENGTHS = ("data.max_prompt_length", "data.max_response_length")


@entry_point
def main(argv: Sequence[str] | None = None) -> int:
    """Serve until Ctrl-C (exit code 130). Returns 1 if the workers failed, or 2 if the server cannot start."""
    options, words = _parse_arguments(argv)
    try:
        return _run(options, words)
    except REPORTED_ERRORS as error:
        return report_error(error, 2 if isinstance(error, (ValueError, OSError)) else 1)


def _run(options: argparse.Namespace, words: Sequence[str]) -> int:
    keys = frozenset(filter(None, os.environ.get("TINKER_API_KEY", "").split(",")))
    if options.host not in LOOPBACK and not keys:
        raise ValueError(
            f"--host {options.host}: other machines could use the server without a key. Set the environment variable "
            "TINKER_API_KEY to one or more keys, separated by commas."
        )
    if wrong := [key for key in keys if not key.startswith("tml-")]:
        raise ValueError(f"TINKER_API_KEY: clients send only keys that start with tml-, but {len(wrong)} do not.")
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    socket.create_server((options.host, options.port), family=family).close()
    keys_and_values = {"model.path": options.model, **DEFAULTS}
    config = load_loop_config(keys_and_values, words, options.engines, None)
    _check_settings(config)
    given = [word.partition("=")[0] for word in words]
    keys_and_values |= {} if set(LENGTHS) & set(given) else _choose_lengths(config)
    root = config.trainer.folder.absolute().parent
    with (
        lock_folder(root, key="trainer.output_dir"),
        Trainer(keys_and_values, *words, engines=options.engines) as trainer,
    ):
        store = CheckpointStore(root, int(options.max_storage_gib * 2**30))
        served = _describe_model(trainer, options)
        server = Server(trainer.aio, store, served, lambda text: print(text, flush=True))
        host = f"[{options.host}]" if ":" in options.host else options.host
        url = f"http://{host}:{options.port}"
        key = "one of the server's keys" if keys else "tml-local"
        message = f"{served.name}: tinker.ServiceClient(base_url={url!r}), TINKER_API_KEY={key} (stop with Ctrl-C)"
        app = build_app(server, keys, ["*"] if keys else list_trusted_hosts(options.host))
        settings = uvicorn.Config(app, options.host, options.port, http="h11", log_level="warning")  # limits headers
        settings.timeout_graceful_shutdown = 5
        web = WebServer(settings, server.futures)
        asyncio.run(_serve(web, server, trainer, message))
        if web.is_interrupted:
            raise KeyboardInterrupt
    return 0


class WebServer(uvicorn.Server):
    """Web server that ends at SIGINT or SIGTERM without raising, so that its caller can save what clients have."""

    is_interrupted = False

    def __init__(self, config: uvicorn.Config, futures: Futures):
        super().__init__(config)
        self._futures = futures

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop, numbers = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)
        for number in numbers:
            loop.add_signal_handler(number, self._interrupt)
        yield

    def _interrupt(self) -> None:
        self.is_interrupted = self.should_exit = True
        self._futures.stop_waiting()


async def _serve(web: WebServer, server: Server, trainer: Trainer, message: str) -> None:
    """Serve until a signal arrives. Then end all sessions, which saves unsaved steps. Raises the error of a worker that
    was lost."""
    serving = asyncio.create_task(web.serve())
    while not (web.started or serving.done()):
        await asyncio.sleep(0.05)
    print(message, flush=True)
    while not (await asyncio.wait([serving], timeout=POLL_SECONDS))[0]:
        web.should_exit |= not trainer.is_running or server.futures.lost_worker is not None
        if web.should_exit:
            server.futures.stop_waiting()
        else:
            server.end_silent_sessions()
    await serving
    await server.end_all_sessions()
    if server.futures.lost_worker is not None:
        raise server.futures.lost_worker


def _check_settings(config: Config) -> None:
    """Raises ValueError for settings with which clients would get other results than they ask for."""
    role = config.actor_rollout_ref
    needed = {
        "rollout.lora": (role.rollout.lora, ("adapter",)),
        "rollout.name": (role.rollout.name, ("vllm",)),
        "rollout.temperature": (role.rollout.temperature, (1.0,)),
        "optim.name": (role.actor.optim.name, ("adamw",)),
        "use_kl_loss": (role.actor.use_kl_loss, (False,)),
    }
    for key, (value, allowed) in needed.items():
        if value not in allowed:
            raise ValueError(f"{key}={value} is not supported by this server. Use {key}={allowed[0]}.")


def _choose_lengths(config: Config) -> dict[str, int]:
    text_config = load_config(config.actor_rollout_ref.model).get_text_config()
    context = min(getattr(text_config, "max_position_embeddings", CONTEXT), CONTEXT)
    return dict(zip(LENGTHS, (context // 2, context - context // 2), strict=True))


def _describe_model(trainer: Trainer, options: argparse.Namespace) -> ServedModel:
    model, data = trainer.config.actor_rollout_ref.model, trainer.config.data
    tokenizer = model.tokenizer_path or model.path
    renderer = Renderer(load_tokenizer(tokenizer, model.trust_remote_code), model_path=model.path)
    return ServedModel(
        name=options.name or options.model,
        tokenizer=str(Path(tokenizer).resolve()) if Path(tokenizer).is_dir() else tokenizer,
        context=data.max_length,
        max_rank=model.lora_rank,
        max_models=options.max_models,
        stop_token_ids=renderer.eos_token_ids,
        find_stop_ids=partial(find_stop_ids, renderer.tokenizer),
        layers=trainer.list_adapted_layers(),
    )


def _parse_arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = make_parser(
        "tinker",
        usage="alphaapollo tinker MODEL [options] [KEY=VALUE ...]",
        epilog="Keys are those of alphaapollo.Trainer, e.g. lora_rank (the largest rank of a client), model.dtype, "
        "rollout.dtype, rollout.max_loras. Set the environment variable TINKER_API_KEY to require one of several keys.",
    )
    parser.add_argument("model", help="model folder, hub id or run folder")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8400)
    parser.add_argument("--name", help="base_model of the clients (default: MODEL)")
    parser.add_argument("--engines", type=int, help="number of inference engines")
    parser.add_argument("--max-models", type=int, default=32, help="training clients of one API key at a time")
    parser.add_argument("--max-storage-gib", type=float, default=50.0, help="checkpoints of one API key")
    options, words = parser.parse_known_args(argv)
    if wrong := [word for word in words if "=" not in word or word.startswith("-")]:
        parser.error(f"{wrong[0]} is no option and no KEY=VALUE")
    return options, words
