"""`alphaapollo chat RUN`: chat with a run's model in the run's environment.

user input -> Prompt(messages so far) -> one episode, whose turns and tool results are printed as they arrive
With env.env_name=agent, each message of the user starts a session of the program.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alphaapollo.cli.main import make_parser
from alphaapollo.config.errors import report_error
from alphaapollo.config.keys import replace_value
from alphaapollo.config.resolve import resolve_controller
from alphaapollo.config.schema import Env, GenerationConfig
from alphaapollo.controller.errors import REPORTED_ERRORS
from alphaapollo.controller.launcher import launch_workers
from alphaapollo.data.vocabulary import find_stop_ids
from alphaapollo.engines.agent_sessions import AgentSession, Request, list_new_messages
from alphaapollo.engines.factory import make_engine
from alphaapollo.environments.base import Environment, Services, StepResult, get_environment_spec, register_environment
from alphaapollo.observability.console import Console
from alphaapollo.observability.terminal import Terminal
from alphaapollo.processes.entry_point import entry_point
from alphaapollo.processes.time_limit import TimeLimit
from alphaapollo.processes.watchdog import new_run_id, start_reaper
from alphaapollo.rollout.agents.runner import AgentRunner, open_agent_runner
from alphaapollo.runs.newest_model import load_run_model
from alphaapollo.types import IMAGE_MARK, EpisodeEnd, GroupRequest, Message, Prompt, Sampling, Score
from alphaapollo.utils.seeds import derive_seed

if TYPE_CHECKING:
    from alphaapollo.launch.inference import ChatPreparation

USAGE = "Each line is a message; /quit or Ctrl-D exits, Ctrl-C stops an answer."
AnswerFunction = Callable[[list[Message]], str | None]
"""Function that prints and returns the answer to a list of messages; None = failed, so the last message is dropped."""
AsyncAnswerFunction = Callable[[list[Message]], Coroutine[object, None, str | None]]


@entry_point
def main(argv: Sequence[str] | None = None) -> int:
    """Run a chat. Returns exit code 0 at its end, 1 if it failed, 2 for invalid arguments or settings."""
    options = _parse_arguments(argv)
    try:
        newest, config = load_run_model(options.run, options.keys)
        chat_with_run(config, f"{newest.model_folder}, in {config.env.env_name}. {USAGE}")
    except REPORTED_ERRORS as error:
        return report_error(error, 2 if isinstance(error, ValueError) else 1)
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
        if text:
            chat = [*past, Message(role="user", content=text)]
            try:
                reply = answer(chat)
            except KeyboardInterrupt:
                print("(stopped)")
                continue
            if reply is not None:
                past = [*chat, Message(role="assistant", content=reply)]


def chat_with_run(config: GenerationConfig, greeting: str) -> None:
    """Chat in a run's environment, with an engine that this process starts. Base models continue the user's line.

    The event loop does not run between messages, so that input() works normally.
    """
    from alphaapollo.launch.inference import ChatPreparation, choose_context_length  # imports torch

    longest = max(choose_context_length(config) - config.data.max_response_length, config.data.max_prompt_length)
    console = Console()
    prepared = ChatPreparation(replace_value(config, "data.max_prompt_length", longest), console).prepare()
    for notice in prepared.notices:
        console.notify(notice)
    terminal = Terminal(highlight=False)
    terminal.write(greeting)
    folder = Path(tempfile.mkdtemp(prefix="alphaapollo_chat_"))  # removed by @entry_point
    open_chat = open_agent_chat if config.env.env_name == "agent" else open_episode_chat
    opening = open_chat(prepared, folder, terminal)
    opened = AsyncExitStack()
    with asyncio.Runner() as runner:
        try:
            with terminal.status("starting the engine ..."):
                answer = runner.run(opened.enter_async_context(opening))
            run_chat(lambda messages: runner.run(answer(messages)))
        finally:
            runner.run(opened.aclose())


@asynccontextmanager
async def open_episode_chat(
    prepared: ChatPreparation, folder: Path, terminal: Terminal
) -> AsyncIterator[AsyncAnswerFunction]:
    """Context manager that starts the engine and yields a function that runs an episode."""
    trainer, numbers = prepared.config.trainer, count(1)
    is_chat_model = bool(prepared.renderer.tokenizer.chat_template)
    env = register_printing_environment(prepared.config.env, terminal)
    prepared.config = prepared.config.model_copy(update={"env": env})
    specs = prepared.make_specs(folder)
    workers = await launch_workers(specs, resolve_controller(trainer), trainer.start_timeout, {})

    async def answer(messages: list[Message]) -> str | None:
        number = next(numbers)
        prompt = Prompt(number, "chat", messages if is_chat_model else messages[-1]["content"])
        request = GroupRequest(prompt, 1, prepared.make_sampling(), stream_position=number, validate=True)
        groups = [group async for _, group in workers.engines.generate([request])]
        trajectory = groups[0].trajectories[0]
        if trajectory.score.outcome.failed:
            terminal.print(f"(failed: {trajectory.score.reason})", style="red", markup=False, soft_wrap=True)
            return None
        if trajectory.end is not EpisodeEnd.DONE:
            terminal.print(f"(ended by the {trajectory.end.replace('_', ' ')})", style="yellow")
        return trajectory.turns[-1].text

    try:
        yield answer
    finally:
        await workers.close()


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
    spec = get_environment_spec(env.env_name)

    async def skip_scoring(prompt: Prompt, text: str) -> Score:
        return Score(0.0)

    def make_environment(services: Services) -> Any:
        return EnvironmentPrinter(spec.factory(replace(services, score=skip_scoring, config=env)), terminal)

    name = f"printed {env.env_name}"
    register_environment(name, tools=spec.tools)(make_environment)
    return env.model_copy(update={"env_name": name})


@asynccontextmanager
async def open_agent_chat(
    prepared: ChatPreparation, folder: Path, terminal: Terminal
) -> AsyncIterator[AsyncAnswerFunction]:
    """Context manager that starts the engine and yields a function that runs a session of the program."""
    config = prepared.config
    sampling, renderer = prepared.make_sampling(), prepared.renderer
    ids = (*renderer.eos_token_ids, *find_stop_ids(renderer.tokenizer, sampling.stop))
    sampling = replace(sampling, stop_token_ids=ids)
    tokenizer = config.model.tokenizer_path or config.model.path
    spec = replace(
        prepared.make_engine_spec(),
        max_model_len=config.data.max_length,
        log_path=str(folder / "logs" / "engine_0.log"),
        chat_tokenizer=tokenizer,
        tokenizer_path=tokenizer,
    )
    start_reaper(new_run_id(), [])
    engine = make_engine(spec)
    try:
        await engine.start()
        around = partial(print_request, terminal)
        async with open_agent_runner(engine, config.env, config.data, around=around) as runner:
            yield partial(answer_with_agent, runner, terminal, sampling)
    finally:
        await engine.close()


async def answer_with_agent(
    runner: AgentRunner, terminal: Terminal, sampling: Sampling, messages: list[Message]
) -> str | None:
    """Run the program once with the chat as the content of its task. Returns its last answer; None if it failed."""
    number = sum(message["role"] == "user" for message in messages)
    timeout = runner.agent.timeout
    session = AgentSession(sampling, partial(derive_seed, sampling.seed, "chat", number), runner.limits)
    try:
        prompt = Prompt(number, "chat", messages, ground_truth="")
        error = (await runner.run_program(prompt, 0, session, TimeLimit(timeout))).error
    except TimeoutError:
        error = f"the program took longer than env.agent.timeout={timeout:g} s"
    if not error and not session.answers:
        error = "the program made no request to the policy"
    if error:
        terminal.print(f"(failed: {error})", style="red", markup=False, soft_wrap=True)
        return None
    return session.answers[-1].content


async def print_request(terminal: Terminal, request: Request, answer: Callable[[], Awaitable[None]]) -> None:
    """Answer a request of the program, then print what it adds to its chat, and its answers."""
    await answer()
    if not request.answers:
        return
    parent, requests = request.answers[0].parent, request.session.requests
    index = requests.index(request)
    if index and parent not in requests[index - 1].answers:
        role = f", role {request.role}" if request.role else ""
        terminal.print(f"  (another chat of the session{role})", style="yellow", markup=False)
    for message in list_new_messages(request, parent) if index else ():  # the first request has the user's message
        terminal.write(f"  [{message['role']}] {message['content'].strip()}")
    for reply in request.answers:
        terminal.print(reply.text.strip(), style="bold", markup=False, soft_wrap=True)


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(
        "chat",
        usage="alphaapollo chat RUN [KEY=VALUE ...]",
        epilog=f"{USAGE} Keys are main_generation's, e.g. rollout.temperature=0.2 "
        "data.max_response_length=1024 env.env_name=single_turn.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="a run's folder, a checkpoint, or a model's folder")
    parser.add_argument("keys", metavar="KEY=VALUE", nargs="*", help=argparse.SUPPRESS)
    return parser.parse_intermixed_args(sys.argv[1:] if argv is None else argv)
