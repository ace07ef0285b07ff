"""`alphaapollo chat RUN`: chat with a model through the engine, environment and tools of its run.

line -> Prompt(chat so far) -> one episode: the model's turns and tool results are printed as they come
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from alphaapollo.cli.run_folder import load_run_model
from alphaapollo.config.errors import exit_on_config_error, report_error
from alphaapollo.config.schema import GenerationConfig
from alphaapollo.observability.terminal import Terminal
from alphaapollo.types import EpisodeEnd, GroupRequest, Message, Prompt, Sampling, Trajectory
from alphaapollo.utils.entry_point import command

if TYPE_CHECKING:
    from alphaapollo.controller.worker_groups import WorkerGroups
    from alphaapollo.environments.base import StepResult
    from alphaapollo.evaluation.generation import GenerationPlan

USAGE = "Each line is a message; /new starts a new chat, /quit or Ctrl-D exits, Ctrl-C stops an answer."


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run a chat. Returns 0 at its end, 1 if it failed, 2 if refused before the start."""
    options = _parse(argv)
    if options.url:
        from alphaapollo.cli.chat_served import chat_with_server

        return chat_with_server(options.url, options.name)
    terminal = Terminal(highlight=False)
    folder = Path(tempfile.mkdtemp(prefix="alphaapollo_chat_"))
    try:
        with exit_on_config_error():
            newest, config = load_run_model(options.run, options.keys)
            from alphaapollo.launch.failures import FAILURES

            try:
                generation, is_chat_model = prepare(config, folder, EpisodePrinter(terminal))
            except ValueError as error:
                return report_error(error, 2)
        try:
            terminal.print(f"{newest.folder}, in {config.env.env_name}. {USAGE}", markup=False, soft_wrap=True)
            Chat(generation, terminal, is_chat_model).run()
        except FAILURES as error:
            return report_error(error, 1)
        return 0
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def prepare(config: GenerationConfig, folder: Path, view: EpisodePrinter) -> tuple[GenerationPlan, bool]:
    """Check like a generation. Returns the plan and whether the tokenizer has a chat template.

    Raises ValueError for an unusable environment, tool, template or model.
    """
    from alphaapollo.cli.observed_environment import observe
    from alphaapollo.config.resolve import engine_threads, resolve_device, resolve_rollout
    from alphaapollo.controller.placement import detect_machine
    from alphaapollo.evaluation.generation import GenerationPlan
    from alphaapollo.evaluation.results import FinishedResults
    from alphaapollo.launch.input_checks import check_lengths, find_environment, make_renderer
    from alphaapollo.launch.resume import StartPoint
    from alphaapollo.models.folder_check import check_weights

    find_environment(config.env)
    check_weights(config.model, "model.path")
    check_lengths(config.model, config.rollout, config.data)
    renderer = make_renderer(config.env, config.model, config.data.apply_chat_template_kwargs)
    machine = detect_machine()
    device = resolve_device(config.trainer.device, machine.num_gpus)
    rollout = resolve_rollout(config.rollout, config.model, device, config.trainer.num_gpus)
    threads = engine_threads(rollout, machine.num_cores, nnodes=1, own_cores=False)
    observed = config.model_copy(update={"env": observe(config.env, view)})
    rollout = rollout.model_copy(update={"cpu_threads": threads})
    generation = GenerationPlan(observed, device, rollout, [], FinishedResults(), StartPoint(folder), folder)
    return generation, bool(renderer.tokenizer.chat_template)


class EpisodePrinter:
    """Prints an episode."""

    def __init__(self, terminal: Terminal):
        self._terminal = terminal

    def model_turn(self, text: str) -> None:
        self._terminal.print(text.strip(), style="bold", markup=False, soft_wrap=True)

    def environment_reply(self, result: StepResult) -> None:
        for message in result.observation.messages if result.observation else ():
            self._terminal.print(f"  [{message['role']}] {message['content'].strip()}", markup=False, soft_wrap=True)
        if not result.valid:
            self._terminal.print("  (the environment could not parse an action)", style="yellow")


class Chat:
    """A chat with its own engine. A model without chat template continues each line as text."""

    def __init__(self, generation: GenerationPlan, terminal: Terminal, is_chat_model: bool):
        self._generation, self._terminal, self._is_chat_model = generation, terminal, is_chat_model
        self._past: list[Message] = []
        self._number = 0

    def run(self) -> None:
        """Run until the user exits. No event loop runs between messages, so that input() works normally."""
        from alphaapollo.evaluation.generation import launch

        with asyncio.Runner() as runner:
            with self._terminal.status("starting the engine ..."):
                workers = runner.run(launch(self._generation))
            try:
                while (text := _ask()) is not None:
                    if text == "/new":
                        self._past = []
                    elif text:
                        self._exchange(runner, workers, text)
            finally:
                runner.run(workers.close())

    def _exchange(self, runner: asyncio.Runner, workers: WorkerGroups, text: str) -> None:
        self._number += 1
        chat = [*self._past, Message(role="user", content=text)]
        try:
            trajectory = runner.run(
                self._generate(workers, Prompt(self._number, "chat", chat if self._is_chat_model else text))
            )
        except KeyboardInterrupt:
            self._terminal.print("(stopped)")
            return
        if trajectory.score.outcome.failed:
            self._terminal.print(f"(failed: {trajectory.score.reason})", style="red", markup=False, soft_wrap=True)
            return
        if trajectory.end is not EpisodeEnd.DONE:
            self._terminal.print(f"(ended by the {trajectory.end.replace('_', ' ')})", style="yellow")
        self._past = [*chat, Message(role="assistant", content=trajectory.turns[-1].text)]

    async def _generate(self, workers: WorkerGroups, prompt: Prompt) -> Trajectory:
        config = self._generation.config
        rollout, data = config.rollout, config.data
        sampling = Sampling(
            data.max_response_length, rollout.temperature, rollout.top_p, rollout.top_k, config.trainer.seed
        )
        request = GroupRequest(prompt, 1, sampling, draw=self._number, validate=True)
        groups = [group async for _, group in workers.engines.generate([request])]
        return groups[0].trajectories[0]


def _ask() -> str | None:
    """Read the next line; None at the end of the chat."""
    try:
        text = input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        print()
        return None
    return None if text == "/quit" else text


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="alphaapollo chat",
        usage="alphaapollo chat RUN [KEY=VALUE ...] | alphaapollo chat --url URL [--name MODEL]",
        description="Chat with a run's newest model through the engine, environment and tools of the run; tool calls "
        "and results are printed as they happen. Or chat with an OpenAI-compatible server.",
        epilog=f"{USAGE} Keys are main_generation's, e.g. rollout.temperature=0.2 "
        "data.max_response_length=1024 env.env_name=single_turn.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", nargs="?", help="a run's folder, a checkpoint, or a model's folder")
    parser.add_argument("keys", metavar="KEY=VALUE", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--url", help="URL of a server, e.g. http://127.0.0.1:8000/v1 (alphaapollo serve)")
    parser.add_argument("--name", help="model of the server (default: its first)")
    options = parser.parse_intermixed_args(sys.argv[1:] if argv is None else argv)
    if bool(options.run) == bool(options.url):
        parser.error("give a RUN, or --url of a server")
    return options
