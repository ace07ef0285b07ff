"""Chat with an agent (env.env_name=agent): each message of the user starts a session of the program."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from alphaapollo.config.schema import GenerationConfig, Rollout
from alphaapollo.config.schema.base import Device
from alphaapollo.engines.factory import make_engine
from alphaapollo.engines.protocol import EngineSpec
from alphaapollo.observability.terminal import Terminal
from alphaapollo.processes.time_limit import TimeLimit
from alphaapollo.processes.watchdog import new_run_id, start_reaper
from alphaapollo.rollout.agents.rows import list_new_messages
from alphaapollo.rollout.agents.runner import AgentRunner, open_agent_runner
from alphaapollo.rollout.agents.session import AgentSession, Request
from alphaapollo.types import Message, Prompt, Sampling
from alphaapollo.utils.seeds import derive_seed


@asynccontextmanager
async def open_agent_chat(
    config: GenerationConfig, rollout: Rollout, device: Device, folder: Path, terminal: Terminal, sampling: Sampling
) -> AsyncIterator[Callable[[list[Message]], Coroutine[Any, Any, str | None]]]:
    """Context manager that starts the engine and yields a function that prints and returns the answer to a chat."""
    model = config.model
    spec = EngineSpec(
        index=0,
        model_path=model.path,
        trust_remote_code=model.trust_remote_code,
        rollout=rollout,
        device=device,
        dtype=rollout.dtype,
        max_model_len=config.data.max_length,
        log_path=str(folder / "logs" / "engine_0.log"),
        chat_tokenizer=model.tokenizer_path or model.path,
        tokenizer_path=model.tokenizer_path or model.path,
    )
    start_reaper(new_run_id(), [])
    engine = make_engine(spec)
    try:
        await engine.start()
        around = partial(print_request, terminal)
        async with open_agent_runner(engine, config.env, config.data, around=around) as runner:
            yield partial(answer_chat, runner, terminal, sampling)
    finally:
        await engine.close()


async def answer_chat(
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
    return session.answers[-1].sampled.content


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
    for one in request.answers:
        terminal.print(one.sampled.text.strip(), style="bold", markup=False, soft_wrap=True)
