"""`alphaapollo chat RUN`: chat with a run's model in the run's environment, or with an OpenAI-compatible server.

user input -> Prompt(messages so far) -> one episode, whose turns and tool results are printed as they arrive
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alphaapollo.cli.serve import choose_context_length
from alphaapollo.config.errors import exit_on_config_error, report_error
from alphaapollo.config.schema import Env, GenerationConfig
from alphaapollo.environments.base import Environment, Services, StepResult, get_environment_spec, register_environment
from alphaapollo.observability.terminal import Terminal
from alphaapollo.processes.entry_point import entry_point
from alphaapollo.rewards.openai_connection import make_connection_options, make_openai_message
from alphaapollo.runs.run_model import load_run_model
from alphaapollo.types import IMAGE_MARK, EncodedImage, EpisodeEnd, GroupRequest, Message, Prompt, Score, Trajectory
from alphaapollo.utils.redaction import replace_control_characters

if TYPE_CHECKING:
    from alphaapollo.controller.worker_groups import WorkerGroups

USAGE = (
    "Each line is a message, in which the path of an image shows the image; /new starts a new chat, /quit or Ctrl-D "
    "exits, Ctrl-C stops an answer."
)
API_KEY_VARIABLE = "OPENAI_API_KEY"
IMAGE_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
WORD = re.compile(r"""\"[^"]*"|'[^']*'|\S+""")  # or a text in quotes
AnswerFunction = Callable[[list[Message]], str | None]
"""Function that prints and returns the answer to a list of messages; None = failed, so the last message is dropped."""


@entry_point
def main(argv: Sequence[str] | None = None) -> int:
    """Run a chat. Returns exit code 0 at its end, 1 if it failed, 2 for invalid arguments or settings."""
    options = _parse_arguments(argv)
    if options.url:
        try:
            chat_with_server(options.url, options.name)
        except ValueError as error:
            return report_error(error, 2)
        return 0
    terminal = Terminal(highlight=False)
    with exit_on_config_error():
        newest, config = load_run_model(options.run, options.keys)
        from alphaapollo.launch.command import REPORTED_ERRORS

        try:
            chat = EngineChat(config, terminal)
        except ValueError as error:
            return report_error(error, 2)
    terminal.write(f"{newest.model_folder}, in {config.env.env_name}. {USAGE}")
    try:
        chat.run()
    except REPORTED_ERRORS as error:
        return report_error(error, 1)
    return 0


def run_chat(answer: AnswerFunction) -> None:
    """Read the user's messages from stdin and answer each, until the user exits."""
    past: list[Message] = []
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if text == "/quit":
            return
        if text == "/new":
            past = []
        elif text.startswith("/") and " " not in text and "images" not in make_user_message(text):
            print(f"{text} is not a command. {USAGE}")
        elif text:
            chat = [*past, make_user_message(text)]
            try:
                reply = answer(chat)
            except KeyboardInterrupt:
                print("(stopped)")
                continue
            if reply is not None:
                past = [*chat, Message(role="assistant", content=reply)]


def make_user_message(line: str) -> Message:
    """Return the message of a line. Each word that is the path of an image, with or without quotes, becomes an image.

    >>> make_user_message("what is this?")
    {'role': 'user', 'content': 'what is this?'}
    """
    encoded_images: list[EncodedImage] = []

    def replace_path(match: re.Match[str]) -> str:
        path = Path(match[0].strip("\"'")).expanduser()
        if path.suffix.lower() not in IMAGE_SUFFIXES or not path.is_file():
            return match[0]
        encoded_images.append(path.read_bytes())
        return IMAGE_MARK

    text = WORD.sub(replace_path, line)
    return (
        Message(role="user", content=text, images=encoded_images)
        if encoded_images
        else Message(role="user", content=text)
    )


class EngineChat:
    """Chat in a run's environment, with an engine that this process starts. Base models continue the user's line.

    Raises ValueError if the environment, a tool, the chat template or the model cannot be used.
    """

    def __init__(self, config: GenerationConfig, terminal: Terminal):
        from alphaapollo.config.resolve import resolve_generation
        from alphaapollo.controller.placement import detect_machine
        from alphaapollo.launch.input_checks import find_environment_spec, make_renderer
        from alphaapollo.launch.model_requirements import ModelUse, check_models

        find_environment_spec(config.env)
        check_models([ModelUse("model.path", config.model, engine=config.rollout, lengths=config.data)])
        longest = max(choose_context_length(config) - config.data.max_response_length, config.data.max_prompt_length)
        config = config.model_copy(update={"data": config.data.model_copy(update={"max_prompt_length": longest})})
        renderer = make_renderer(config.env, config.model, config.data.apply_chat_template_kwargs)
        self._is_chat_model, self._stop_token_ids = bool(renderer.tokenizer.chat_template), renderer.eos_token_ids
        machine = detect_machine()
        self._device, self._rollout = resolve_generation(config, machine.num_gpus, machine.num_cores)
        self._config = config
        self._terminal, self._num_prompts = terminal, 0

    def run(self) -> None:
        """Chat until the user exits. The event loop does not run between messages, so that input() works normally."""
        folder = Path(tempfile.mkdtemp(prefix="alphaapollo_chat_"))  # removed by @entry_point
        opened = AsyncExitStack()
        with asyncio.Runner() as runner:
            try:
                with self._terminal.status("starting the engine ..."):
                    answer = runner.run(opened.enter_async_context(self._start(folder)))
                run_chat(lambda messages: runner.run(answer(messages)))
            finally:
                runner.run(opened.aclose())

    @asynccontextmanager
    async def _start(self, folder: Path) -> AsyncIterator[Callable[[list[Message]], Coroutine[Any, Any, str | None]]]:
        """Context manager that starts the engine and yields a function like AnswerFunction."""
        from alphaapollo.evaluation.generation import launch_engines, make_sampling

        config = self._config
        if config.env.env_name == "agent":
            from alphaapollo.cli.agent_chat import open_agent_chat

            sampling = replace(make_sampling(config), stop_token_ids=self._stop_token_ids)
            opened = open_agent_chat(config, self._rollout, self._device, folder, self._terminal, sampling)
            async with opened as answer:
                yield answer
            return
        config = config.model_copy(update={"env": register_printing_environment(config.env, self._terminal)})
        workers = await launch_engines(config, self._rollout, self._device, folder)
        try:
            yield partial(self._answer_chat, workers)
        finally:
            await workers.close()

    async def _answer_chat(self, workers: WorkerGroups, messages: list[Message]) -> str | None:
        is_chat = self._is_chat_model or bool(messages[-1].get("images"))  # only chats have images
        content = messages if is_chat else messages[-1]["content"]
        trajectory = await self._generate_trajectory(content, workers)
        if trajectory.score.outcome.failed:
            self._terminal.print(f"(failed: {trajectory.score.reason})", style="red", markup=False, soft_wrap=True)
            return None
        if trajectory.end is not EpisodeEnd.DONE:
            self._terminal.print(f"(ended by the {trajectory.end.replace('_', ' ')})", style="yellow")
        return trajectory.turns[-1].text

    async def _generate_trajectory(self, content: list[Message] | str, workers: WorkerGroups) -> Trajectory:
        from alphaapollo.evaluation.generation import make_sampling

        self._num_prompts += 1
        prompt = Prompt(self._num_prompts, "chat", content)
        request = GroupRequest(prompt, 1, make_sampling(self._config), stream_position=self._num_prompts, validate=True)
        groups = [group async for _, group in workers.engines.generate([request])]
        return groups[0].trajectories[0]


class EnvironmentPrinter:
    """Environment wrapper that prints each action of the model and the environment's reply."""

    def __init__(self, inner: Environment, terminal: Terminal):
        self._inner, self._terminal = inner, terminal

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # e.g. reset, close, recall

    async def step(self, action: str) -> StepResult:
        self._terminal.print(action.strip(), style="bold", markup=False, soft_wrap=True)
        result: Any = await asyncio.to_thread(self._inner.step, action)  # an async step returns a coroutine at once
        if inspect.isawaitable(result):
            result = await result
        for message in result.observation.messages if result.observation else ():
            content: Any = message["content"]  # a text, or a list of parts
            text = content if isinstance(content, str) else "".join(part.get("text") or IMAGE_MARK for part in content)
            self._terminal.write(f"  [{message['role']}] {text.strip()}")
        if not result.valid:
            self._terminal.print("  (the environment could not parse an action)", style="yellow")
        return result


def register_printing_environment(env: Env, terminal: Terminal) -> Env:
    """Register the environment, wrapped in an EnvironmentPrinter, and return settings that select the wrapper."""
    known = get_environment_spec(env.env_name)

    async def skip_scoring(prompt: Prompt, text: str) -> Score:
        return Score(0.0)

    def make_environment(services: Services) -> Any:
        return EnvironmentPrinter(known.factory(replace(services, score=skip_scoring, config=env)), terminal)

    name = f"printed {env.env_name}"
    register_environment(name, tools=known.tools)(make_environment)
    return env.model_copy(update={"env_name": name})


def chat_with_server(url: str, model_name: str | None) -> None:
    """Chat with an OpenAI-compatible server until the user exits. Raises ValueError if the server cannot be used."""
    connection = make_connection_options("chat --url", url, API_KEY_VARIABLE)
    from openai import OpenAI, OpenAIError

    client: Any = OpenAI(**connection)

    def stream_answer(messages: list[Message]) -> str:
        parts, sent = [], [make_openai_message(message) for message in messages]
        for chunk in client.chat.completions.create(model=model, messages=sent, stream=True):
            part = chunk.choices[0].delta.content if chunk.choices else None
            if part:
                parts.append(part)
                print(replace_control_characters(part), end="", flush=True)
        print()
        return "".join(parts)

    try:
        model = model_name or next((entry.id for entry in client.models.list()), None)
        if model is None:
            raise ValueError(f"--url {url}: the server lists no model. Set --name MODEL.")
        print(replace_control_characters(f"{model} at {url}. {USAGE}"))
        run_chat(stream_answer)
    except OpenAIError as error:
        raise ValueError(
            f"--url {url}: the request failed ({error}). Check that the server runs and that {API_KEY_VARIABLE} is "
            "the server's API key."
        ) from error


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
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
    parser.add_argument("--name", help="model of the server (default: the first one that it lists)")
    options = parser.parse_intermixed_args(sys.argv[1:] if argv is None else argv)
    if bool(options.run) == bool(options.url):
        parser.error("set either RUN or --url URL")
    return options
