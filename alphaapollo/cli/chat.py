"""`alphaapollo chat RUN`: a person in place of the data, on the run's own engine, environment and tools.

a line -> Prompt(the chat so far) -> one episode: the model's turns and its tools' answers, shown as they come
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

from alphaapollo.cli.run_folder import model_to_play
from alphaapollo.config.errors import exit_on_config_error, report_error
from alphaapollo.config.schema import GenerationConfig
from alphaapollo.observability.terminal import Terminal
from alphaapollo.types import EpisodeEnd, GroupRequest, Message, Prompt, Sampling, Trajectory
from alphaapollo.utils.entry_point import command

if TYPE_CHECKING:
    from alphaapollo.controller.worker_groups import WorkerGroups
    from alphaapollo.environments.base import StepResult
    from alphaapollo.evaluation.generation import Generation

HOW = "A line is a message; /new begins anew, /quit or Ctrl-D ends, Ctrl-C stops an answer."


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 at the end of the talk, 1 failed, 2 refused before the start."""
    options = _parse(argv)
    if options.url:
        from alphaapollo.cli.chat_served import talk_to_server

        return talk_to_server(options.url, options.name)
    terminal = Terminal(highlight=False)
    folder = Path(tempfile.mkdtemp(prefix="alphaapollo_chat_"))
    try:
        with exit_on_config_error():
            newest, config = model_to_play(options.run, options.keys)
            from alphaapollo.launch.failures import FAILURES

            try:
                generation, speaks = prepare(config, folder, View(terminal))
            except ValueError as error:
                return report_error(error, 2)
        try:
            terminal.print(f"{newest.folder}, in {config.env.env_name}. {HOW}", markup=False, soft_wrap=True)
            Chat(generation, terminal, speaks).talk()
        except FAILURES as error:
            return report_error(error, 1)
        return 0
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def prepare(config: GenerationConfig, folder: Path, view: View) -> tuple[Generation, bool]:
    """Checked as a generation is; and whether its tokenizer has a chat template.

    ValueError: an environment, tools, a template or a model that cannot be played.
    """
    from alphaapollo.cli.watched import watch
    from alphaapollo.config.resolve import engine_threads, resolve_device, resolve_rollout
    from alphaapollo.controller.placement import detect_machine
    from alphaapollo.evaluation.generation import Generation
    from alphaapollo.evaluation.results import Finished
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
    watched = config.model_copy(update={"env": watch(config.env, view)})
    rollout = rollout.model_copy(update={"cpu_threads": threads})
    generation = Generation(watched, device, rollout, [], Finished(), StartPoint(folder), folder)
    return generation, bool(renderer.tokenizer.chat_template)


class View:
    """What a person sees of an episode."""

    def __init__(self, terminal: Terminal):
        self._terminal = terminal

    def said(self, text: str) -> None:
        self._terminal.print(text.strip(), style="bold", markup=False, soft_wrap=True)

    def answered(self, result: StepResult) -> None:
        for message in result.observation.messages if result.observation else ():
            self._terminal.print(f"  [{message['role']}] {message['content'].strip()}", markup=False, soft_wrap=True)
        if not result.valid:
            self._terminal.print("  (the environment could not read an action in this)", style="yellow")


class Chat:
    """The talk so far, on an engine that lives as long. A model that speaks no chat continues each line as it is."""

    def __init__(self, generation: Generation, terminal: Terminal, speaks: bool):
        self._generation, self._terminal, self._speaks = generation, terminal, speaks
        self._past: list[Message] = []
        self._number = 0

    def talk(self) -> None:
        """Until the person ends it. Between messages no event loop runs, so that the terminal is Python's own."""
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
            played = runner.run(self._play(workers, Prompt(self._number, "chat", chat if self._speaks else text)))
        except KeyboardInterrupt:
            self._terminal.print("(stopped)")
            return
        if played.score.outcome.failed:
            self._terminal.print(f"(failed: {played.score.reason})", style="red", markup=False, soft_wrap=True)
            return
        if played.end is not EpisodeEnd.DONE:
            self._terminal.print(f"(ended by the {played.end.replace('_', ' ')})", style="yellow")
        self._past = [*chat, Message(role="assistant", content=played.turns[-1].text)]

    async def _play(self, workers: WorkerGroups, prompt: Prompt) -> Trajectory:
        config = self._generation.config
        rollout, data = config.rollout, config.data
        sampling = Sampling(
            data.max_response_length, rollout.temperature, rollout.top_p, rollout.top_k, config.trainer.seed
        )
        request = GroupRequest(prompt, 1, sampling, draw=self._number, validate=True)
        groups = [group async for _, group in workers.engines.generate([request])]
        return groups[0].trajectories[0]


def _ask() -> str | None:
    """The next line; None: the talk is over."""
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
        description="Talk to a run's newest model through the engine, the environment and the tools of the run; its "
        "calls and what came of them are shown as they happen. Or talk to an OpenAI-compatible server.",
        epilog=f"{HOW} Keys are main_generation's, e.g. rollout.temperature=0.2 data.max_response_length=1024 "
        "env.env_name=single_turn.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", nargs="?", help="a run's folder, a checkpoint, or a model's folder")
    parser.add_argument("keys", metavar="KEY=VALUE", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--url", help="of a server, e.g. http://127.0.0.1:8000/v1 (alphaapollo serve)")
    parser.add_argument("--name", help="of the server's model (default: its first)")
    options = parser.parse_intermixed_args(sys.argv[1:] if argv is None else argv)
    if bool(options.run) == bool(options.url):
        parser.error("give a RUN, or --url of a server")
    return options
