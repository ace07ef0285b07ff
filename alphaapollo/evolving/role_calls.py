"""How a role uses its model: one question, a conversation with tools, or an episode in the run's environment."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from alphaapollo.config.schema import EvolvingConfig, EvolvingRole, EvolvingToolRole
from alphaapollo.environments.actions import ActionHandler, make_action_handler
from alphaapollo.environments.base import (
    Environment,
    EnvironmentFailure,
    FinalAnswer,
    Services,
    StepResult,
    wrap_environment_errors,
)
from alphaapollo.environments.informal_math import describe_call
from alphaapollo.evolving.budget import Budget, EvolutionStopped, compute_price
from alphaapollo.evolving.model_clients import ModelCallError, ModelClient
from alphaapollo.evolving.pool import ModelCall, Pool, Usage
from alphaapollo.evolving.roles import ModelReply, Role, RoleView, make_role
from alphaapollo.rollout.check_replies import check_messages, check_reset_reply, check_step_reply
from alphaapollo.rollout.environment_calls import EnvironmentCaller
from alphaapollo.rollout.episode import ATTEMPTS
from alphaapollo.tools.base import Session
from alphaapollo.types import Message, Outcome, Prompt, Sampling, Score
from alphaapollo.utils.heartbeat import HEARTBEAT
from alphaapollo.utils.seeds import derive_seed
from alphaapollo.utils.time_limit import TimeLimit


class ModelUnavailableError(ConnectionError):
    """evolving.max_failures calls in a row failed because a model's server is down."""


@dataclass
class Transcript:
    """One episode in messages."""

    messages: list[Message] = field(default_factory=list)
    num_prompt_messages: int = 0  # how many of them are the first prompt
    reply: ModelReply | None = None  # the last one, complete
    score: Score | None = None  # given by the environment
    done: bool = False  # the environment ended the episode, rather than a limit
    failure: str = ""  # of the environment

    @property
    def text(self) -> str:
        """Everything after the prompt."""
        return "\n\n".join(message["content"] for message in self.messages[self.num_prompt_messages :])

    @property
    def last_reply(self) -> str:
        """The model's last message, without text that the environment ignored; empty if there is none."""
        own = self.messages[self.num_prompt_messages :]
        return next((message["content"] for message in reversed(own) if message["role"] == "assistant"), "")


@dataclass(frozen=True)
class RoleResult:
    """What a role returned."""

    value: Any = None  # what the role's `read` returned; None: no reply could be read, or the role is disabled
    messages: tuple[Message, ...] = ()  # its prompt
    failure: str = ""


class RoleCaller:
    """Calls roles on their models. Each call is admitted by the budget and logged in the pool.

    Args:
        clients: by model name.
        services: of the environment: its tools, and env.max_steps and env.episode_timeout, which also limit
            conversations with tools.

    Raises:
        ValueError: a plugin is not registered.
    """

    def __init__(
        self, config: EvolvingConfig, pool: Pool, budget: Budget, clients: Mapping[str, ModelClient], services: Services
    ):
        self.roles, self._settings = make_roles(config.all_roles), config.all_roles
        self._config, self._pool, self._budget, self._clients = config, pool, budget, clients
        self._concurrency = {name: asyncio.Semaphore(config.models[name].max_concurrent) for name in clients}
        self._failures_in_a_row: Counter[str] = Counter()
        self._actions = make_action_handler(services)
        self._tools = [schema["function"] for schema in services.tools.schemas()] if services.tools else []
        self._environments = EnvironmentCaller()

    def get_model_name(self, slot: str, branch: str) -> str:
        """The model of a role: its own, or that of the branch."""
        return self._settings[slot].model or branch

    def fits(self, model: str, messages: Sequence[Message]) -> bool:
        """Whether the messages fit into the model's prompt limit."""
        return self._clients[model].fits(messages)

    def derive_call_seed(self, key: str) -> int:
        """Seed of a call: a function of the run's seed and the call's key alone."""
        return derive_seed(self._config.trainer.seed, "evolve", key)

    async def call_model(self, slot: str, branch: str, key: str, messages: Sequence[Message]) -> ModelReply:
        """One reply of a role's model, with its sampling parameters; from the pool if the call has succeeded before.

        Raises:
            ModelCallError: the call failed; the failure is logged.
            EvolutionStopped: the budget does not admit the call.
            ModelUnavailableError: too many calls in a row failed.
        """
        own, model = self._settings[slot], self.get_model_name(slot, branch)
        max_tokens = own.max_tokens or self._config.data.max_response_length
        sampling = Sampling(max_tokens, own.temperature, own.top_p, seed=self.derive_call_seed(key))
        request = msgspec.json.encode([model, list(messages), sampling])
        digest = hashlib.blake2b(request, digest_size=8).hexdigest()
        logged = self._pool.calls.get(key)
        if logged and logged.digest == digest and not logged.failure:
            return ModelReply(logged.text, logged.seed, logged.prompt_tokens, logged.tokens, logged.stop)
        async with self._concurrency[model]:
            maximum = self._bound_usage(model, messages, sampling)
            await self._budget.admit(maximum)
            used = Usage()
            try:
                started = time.perf_counter()
                reply, error = await self._generate(model, key, messages, sampling)
                price = compute_price(self._config.models[model], reply.prompt_tokens, reply.tokens)
                used = Usage(1, reply.prompt_tokens + reply.tokens, price)
                record = ModelCall(
                    key=key,
                    role=slot,
                    model=model,
                    digest=digest,
                    seed=sampling.seed,
                    at=round(self._budget.seconds, 3),
                    seconds=round(time.perf_counter() - started, 4),
                    text=reply.text,
                    prompt_tokens=reply.prompt_tokens,
                    tokens=reply.tokens,
                    money=price,
                    stop=reply.stop,
                    failure=str(error) if error else "",
                )
            finally:
                await self._budget.settle(maximum, used)
        self._pool.append(record)
        if error is None:
            self._failures_in_a_row[model] = 0
            return reply
        self._failures_in_a_row[model] += error.server_down
        count = self._failures_in_a_row[model]
        if count < self._config.evolving.max_failures:
            raise error
        raise ModelUnavailableError(
            f"models.{model}: {count} calls in a row failed; the last error: {error}. No result is lost. Fix the "
            "server, then run the same command again."
        ) from error

    async def _generate(
        self, model: str, key: str, messages: Sequence[Message], sampling: Sampling
    ) -> tuple[ModelReply, ModelCallError | None]:
        """The reply, or an empty one and the error."""
        client = self._clients[model]
        try:
            with HEARTBEAT.call("a reply", f"models.{model}", client.time_limit):
                async with asyncio.timeout(self._budget.seconds_left):
                    return await client.generate(messages, sampling, key), None
        except ModelCallError as error:
            return ModelReply("", sampling.seed), error
        except TimeoutError as error:
            raise EvolutionStopped("budget.seconds ran out while a call was in flight") from error

    def _bound_usage(self, model: str, messages: Sequence[Message], sampling: Sampling) -> Usage:
        """Upper bound of the call's usage. The number of characters bounds the prompt tokens, except for the chat
        template and for scripts with several tokens per character."""
        characters = sum(len(message["content"]) for message in messages)
        price = compute_price(self._config.models[model], characters, sampling.max_tokens)
        return Usage(1, characters + sampling.max_tokens, price)

    async def ask_role(self, slot: str, branch: str, key: str, view: RoleView) -> RoleResult:
        """Ask a role until its reply can be read. key: what for, e.g. `p17.r2.b0.i1/verifier.0`.

        Raises:
            EvolutionStopped, ModelUnavailableError: as `call`.
        """
        if slot not in self.roles:
            return RoleResult()
        own, role = self._settings[slot], self.roles[slot]
        tools = self._tools if isinstance(own, EvolvingToolRole) and own.tools else []
        messages = role.build(replace(view, tools="\n".join(map(describe_call, tools))))
        names, failure = [tool["name"] for tool in tools], ""
        attempts = self._config.evolving.asks + 1
        for number in range(attempts):
            try:
                talk = await self.run_episode(
                    slot,
                    branch,
                    f"{key}/ask{number}.",
                    lambda: ToolConversation(self._actions, names),
                    Prompt(id=0, data_source="", content=""),
                    lambda first: messages,
                )
            except ModelCallError as error:
                failure = str(error)
                continue
            if talk.failure or talk.reply is None:
                failure = talk.failure
            elif (value := role.read(talk.reply)) is not None:
                return RoleResult(value, tuple(messages))
            else:
                failure = f"the reply could not be read: {' '.join(talk.reply.text.split())[-120:]!r}"
        return RoleResult(failure=f"{slot}: no result after {attempts} attempts; the last: {failure}")

    async def run_episode(
        self,
        slot: str,
        branch: str,
        key: str,
        make: Callable[[], Environment],
        prompt: Prompt,
        build: Callable[[list[Message]], list[Message]],
    ) -> Transcript:
        """Run one episode in messages; rollout/episode.py is the variant in tokens, for training.

        A failed environment is replaced once. The pool has the earlier replies, so no call is repeated.

        Args:
            key: of the calls, followed by `turn0`, `turn1`, ...
            build: from the environment's first messages to the role's prompt.
        """
        transcript, limit = Transcript(), self._config.env.episode_timeout
        for attempt in range(1, ATTEMPTS + 1):
            transcript, clock = Transcript(), TimeLimit(limit)
            try:
                with wrap_environment_errors("making the environment"):
                    environment = make()
                try:
                    first = check_reset_reply(await self._environments.call(clock, environment, "reset", prompt))
                    asked = [Message(role="user", content=first)] if isinstance(first, str) else list(first)
                    transcript.messages = check_messages(build(asked), f"{slot}.build")
                    transcript.num_prompt_messages = len(transcript.messages)
                    await self._take_turns(slot, branch, key, transcript, environment, clock)
                    return transcript
                finally:
                    await self._environments.close(environment)
            except TimeoutError:
                transcript.failure = f"the environment took longer than env.episode_timeout={limit:g} s"
                return transcript
            except EnvironmentFailure as error:
                transcript.failure = f"{error} (attempt {attempt} of {ATTEMPTS})"
        return transcript

    async def _take_turns(
        self, slot: str, branch: str, key: str, transcript: Transcript, environment: Environment, clock: TimeLimit
    ) -> None:
        for turn in range(self._config.env.max_steps):
            transcript.reply = await self.call_model(slot, branch, f"{key}turn{turn}", transcript.messages)
            text = transcript.reply.text
            result = check_step_reply(await self._environments.call(clock, environment, "step", text))
            text = text if result.kept_chars is None else text[: result.kept_chars]
            transcript.messages = [*transcript.messages, Message(role="assistant", content=text)]
            if result.done:
                transcript.done, transcript.score = True, result.score
                if result.score and result.score.outcome is Outcome.ENVIRONMENT_FAILED:
                    transcript.failure = result.score.reason
                return
            assert result.observation is not None
            if turn + 1 < self._config.env.max_steps:
                transcript.messages = [*transcript.messages, *result.observation.messages]


def make_roles(settings: Mapping[str, EvolvingRole]) -> dict[str, Role]:
    """The role of each slot that has a plugin. Raises ValueError for a plugin that is not registered."""
    return {slot: make_role(own.plugin) for slot, own in settings.items() if own.plugin}


class ToolConversation:
    """Environment in which a role answers, with the help of tools: a reply without a tool call ends it."""

    def __init__(self, actions: ActionHandler, tool_names: Sequence[str]):
        self._actions, self._tags = actions, [f"<{name}>" for name in tool_names]
        self._session = Session()

    async def reset(self, prompt: Prompt) -> str:
        return ""  # the role has its own prompt

    async def step(self, action: str) -> StepResult:
        if not any(tag in action for tag in self._tags):
            return StepResult(done=True)
        taken = await self._actions.handle(action, self._session)
        return StepResult(done=True, kept_chars=taken.kept_chars) if isinstance(taken, FinalAnswer) else taken

    async def close(self) -> None:
        await self._session.close()
