"""Call the models of roles: one question, a conversation with tools, or an episode in the run's environment.

`role` is a key of the config section `roles`, e.g. `verifier`. `default_model` is the name of the model that answers if
the role's key `model` is not set.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
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
from alphaapollo.environments.informal_math import describe_tool
from alphaapollo.evolving.budget import Budget, EvolutionStopped, compute_call_price
from alphaapollo.evolving.model_clients import ModelCallError, ModelClient
from alphaapollo.evolving.pool import ModelCall, Pool, Usage
from alphaapollo.evolving.roles import ROLES, ModelReply, Role, RoleView
from alphaapollo.processes.time_limit import TimeLimit
from alphaapollo.rollout.context import check_messages, check_reset_reply, check_step_reply
from alphaapollo.rollout.episode import MAX_ATTEMPTS, EnvironmentCaller
from alphaapollo.tools.base import Session
from alphaapollo.types import Message, Outcome, Prompt, Sampling, Score
from alphaapollo.utils.heartbeat import HEARTBEAT
from alphaapollo.utils.redaction import map_texts, replace_surrogates
from alphaapollo.utils.seeds import derive_seed

MAX_ASKS = 3  # requests of a role until its reply can be read
MAX_FAILURES = 20  # consecutive failures of one model whose server is down; then the run stops


class ModelUnavailableError(ConnectionError):
    """Error after MAX_FAILURES consecutive failed calls of a model whose server is down."""


@dataclass
class Transcript:
    """Messages of one episode, and how it ended."""

    messages: list[Message] = field(default_factory=list)
    num_prompt_messages: int = 0  # number of messages in the first prompt
    full_reply: ModelReply | None = None  # last reply, with the text that the environment ignored
    score: Score | None = None  # score by the environment
    ended_by_environment: bool = False  # False: ended by the limit of turns
    failure: str = ""  # reason if the environment failed

    @property
    def text(self) -> str:
        """Text of all messages after the prompt."""
        return "\n\n".join(message["content"] for message in self.messages[self.num_prompt_messages :])

    @property
    def last_message(self) -> str:
        """Last message of the model, cut after the part that the environment used; empty if there is none."""
        own = self.messages[self.num_prompt_messages :]
        return next((message["content"] for message in reversed(own) if message["role"] == "assistant"), "")


@dataclass(frozen=True)
class RoleResult:
    """Result of asking a role, or the reason why there is none."""

    value: Any = None  # result of the role's `read`; None: no readable reply, or the role is disabled
    messages: tuple[Message, ...] = ()  # prompt of the role
    failure: str = ""


class RoleModelCaller:
    """Sender of role prompts to models. Each call must fit the budget and is logged in the pool.

    Args:
        clients: clients by model name.
        services: services of the environment. Conversations with tools use the same tools and limits (env.max_steps,
            env.episode_timeout) as episodes.

    Raises ValueError if a role plugin is not registered.
    """

    def __init__(
        self, config: EvolvingConfig, pool: Pool, budget: Budget, clients: Mapping[str, ModelClient], services: Services
    ):
        self.roles, self._settings = make_roles(config.all_roles), config.all_roles
        self._config, self._pool, self._budget, self.clients = config, pool, budget, clients
        self._concurrency = {name: asyncio.Semaphore(config.models[name].max_concurrent) for name in clients}
        self._failures_in_a_row: Counter[str] = Counter()
        self._actions = make_action_handler(services)
        self._tools = [schema["function"] for schema in services.tools.schemas()] if services.tools else []
        self._environments = EnvironmentCaller()

    def get_model_name(self, role: str, default_model: str) -> str:
        """Return the model name of a role: roles.SLOT.model, else the branch's model."""
        return self._settings[role].model or default_model

    def derive_call_seed(self, call_key: str) -> int:
        return derive_seed(self._config.trainer.seed, "evolve", call_key)

    async def call_model(self, role: str, default_model: str, call_key: str, messages: Sequence[Message]) -> ModelReply:
        """Return one reply of a role's model, from the pool if the same request with this call_key succeeded before.

        Raises:
            ModelCallError: the call failed; the failure is logged.
            EvolutionStopped: the call does not fit the budget, or budget.seconds ends during the call.
            ModelUnavailableError: MAX_FAILURES consecutive calls failed.
        """
        settings, model = self._settings[role], self.get_model_name(role, default_model)
        max_tokens = settings.max_tokens or self._config.data.max_response_length
        sampling = Sampling(max_tokens, settings.temperature, settings.top_p, seed=self.derive_call_seed(call_key))
        messages = map_texts(list(messages), replace_surrogates)  # e.g. of a tool's result
        request = msgspec.json.encode([model, messages, sampling])
        digest = hashlib.blake2b(request, digest_size=8).hexdigest()
        logged = self._pool.calls.get(call_key)
        if logged and logged.digest == digest and not logged.failure:
            return ModelReply(logged.text, logged.seed, logged.prompt_tokens, logged.tokens, logged.stop)
        call = ModelCall(call_key, role, model, digest, sampling.seed, ended_at=0.0, seconds=0.0)
        max_usage = self._estimate_max_usage(model, messages, sampling)
        return await self.log_call(call, max_usage, lambda: self.clients[model].generate(messages, sampling, call_key))

    async def log_call(
        self, call: ModelCall, max_usage: Usage, generate: Callable[[], Awaitable[ModelReply]]
    ) -> ModelReply:
        """Generate a reply as soon as `max_usage` fits the budget, and log the call. Raises like `call_model`."""
        model = call.model
        async with self._concurrency[model]:
            await self._budget.admit_call(max_usage)
            used = Usage()
            try:
                started = time.perf_counter()
                reply, error = await self._generate_reply(call, generate)
                price = compute_call_price(self._config.models[model], reply.prompt_tokens, reply.completion_tokens)
                used = Usage(1, reply.prompt_tokens + reply.completion_tokens, price)
                record = msgspec.structs.replace(
                    call,
                    seed=reply.seed,
                    ended_at=round(self._budget.seconds, 3),
                    seconds=round(time.perf_counter() - started, 4),
                    text=reply.text,
                    prompt_tokens=reply.prompt_tokens,
                    tokens=reply.completion_tokens,
                    money=price,
                    stop=reply.stop_reason,
                    failure=str(error) if error else "",
                )
            finally:
                await self._budget.settle_call(max_usage, used)
        record = self._pool.append(record)
        if error is None:
            self._failures_in_a_row[model] = 0
            return replace(reply, text=record.text)  # as a resumed run reads it
        self._failures_in_a_row[model] += error.server_down
        count = self._failures_in_a_row[model]
        if count < MAX_FAILURES:
            raise error
        raise ModelUnavailableError(
            f"models.{model}: {count} calls in a row failed. Last error: {error}. No result is lost. Fix the "
            "server, then run the same command again."
        ) from error

    async def _generate_reply(
        self, call: ModelCall, generate: Callable[[], Awaitable[ModelReply]]
    ) -> tuple[ModelReply, ModelCallError | None]:
        """Return (reply, None), or (empty reply, error) if the call failed."""
        try:
            with HEARTBEAT.record_call("a reply", f"models.{call.model}", self.clients[call.model].time_limit):
                async with asyncio.timeout(self._budget.seconds_left):
                    return await generate(), None
        except ModelCallError as error:
            return ModelReply("", call.seed), error
        except TimeoutError as error:
            raise EvolutionStopped("budget.seconds ran out while a call was in flight") from error

    def _estimate_max_usage(self, model: str, messages: Sequence[Message], sampling: Sampling) -> Usage:
        """Estimate the maximum usage of a call, with one token per prompt character. The estimate is too low for
        languages with several tokens per character."""
        characters = sum(len(message["content"]) for message in messages)
        price = compute_call_price(self._config.models[model], characters, sampling.max_tokens)
        return Usage(1, characters + sampling.max_tokens, price)

    async def ask_role(self, role: str, default_model: str, call_key_prefix: str, view: RoleView) -> RoleResult:
        """Ask a role until its reply can be read, at most MAX_ASKS times. Raises like `call_model`.
        call_key_prefix: prefix of the call keys, e.g. `p17.r2.b0.i1/verifier.0`."""
        if role not in self.roles:
            return RoleResult()
        settings, plugin = self._settings[role], self.roles[role]
        tools = self._tools if isinstance(settings, EvolvingToolRole) and settings.tools else []
        messages = plugin.build(replace(view, tools="\n".join(map(describe_tool, tools))))
        names, failure = [tool["name"] for tool in tools], ""
        for number in range(MAX_ASKS):
            try:
                transcript = await self.run_episode(
                    role,
                    default_model,
                    f"{call_key_prefix}/ask{number}.",
                    lambda: ToolConversation(self._actions, names),
                    Prompt(id=0, data_source="", content=""),
                    lambda first: messages,
                )
            except ModelCallError as error:
                failure = str(error)
                continue
            if transcript.failure or transcript.full_reply is None:
                failure = transcript.failure
            elif (value := plugin.read(transcript.full_reply)) is not None:
                return RoleResult(value, tuple(messages))
            else:
                failure = f"the reply could not be read: {' '.join(transcript.full_reply.text.split())[-120:]!r}"
        return RoleResult(failure=f"{role}: no result after {MAX_ASKS} attempts. Last failure: {failure}")

    async def run_episode(
        self,
        role: str,
        default_model: str,
        call_key_prefix: str,
        make_environment: Callable[[], Environment],
        prompt: Prompt,
        build_prompt: Callable[[list[Message]], list[Message]],
    ) -> Transcript:
        """Run one episode of a role in an environment. rollout/episode.py is the variant with tokens, for training.

        If the environment fails, the episode is repeated in a new one; replies so far are read from the pool.

        Args:
            call_key_prefix: prefix of the call keys, followed by `turn0`, `turn1`, ...
            build_prompt: function from the environment's first messages to the role's prompt.
        """
        transcript, limit = Transcript(), self._config.env.episode_timeout
        for attempt in range(1, MAX_ATTEMPTS + 1):
            transcript, clock = Transcript(), TimeLimit(limit)
            try:
                with wrap_environment_errors("creating the environment"):
                    environment = make_environment()
                try:
                    first = check_reset_reply(await self._environments.call(clock, environment, "reset", prompt))
                    first_messages = [Message(role="user", content=first)] if isinstance(first, str) else list(first)
                    transcript.messages = check_messages(build_prompt(first_messages), f"{role}.build")
                    transcript.num_prompt_messages = len(transcript.messages)
                    for turn in range(self._config.env.max_steps):
                        call_key = f"{call_key_prefix}turn{turn}"
                        reply = await self.call_model(role, default_model, call_key, transcript.messages)
                        transcript.full_reply = reply
                        result = check_step_reply(await self._environments.call(clock, environment, "step", reply.text))
                        text = reply.text if result.kept_chars is None else reply.text[: result.kept_chars]
                        transcript.messages = [*transcript.messages, Message(role="assistant", content=text)]
                        if result.done:
                            transcript.ended_by_environment, transcript.score = True, result.score
                            if result.score and result.score.outcome is Outcome.ENVIRONMENT_FAILED:
                                transcript.failure = result.score.reason
                            return transcript
                        assert result.observation is not None
                        if turn + 1 < self._config.env.max_steps:
                            transcript.messages = [*transcript.messages, *result.observation.messages]
                    return transcript
                finally:
                    await self._environments.close(environment)
            except TimeoutError:
                transcript.failure = f"the environment took longer than env.episode_timeout={limit:g} s"
                return transcript
            except EnvironmentFailure as error:
                transcript.failure = f"{error} (attempt {attempt} of {MAX_ATTEMPTS})"
        return transcript


def make_roles(settings: Mapping[str, EvolvingRole]) -> dict[str, Role]:
    """Create the role of each slot that has a plugin. Raises ValueError for a plugin that is not registered."""
    return {role: ROLES.get(own.plugin)() for role, own in settings.items() if own.plugin}


class ToolConversation:
    """Environment that runs the tool calls of a role. A reply without a tool call ends the episode."""

    def __init__(self, actions: ActionHandler, tool_names: Sequence[str]):
        self._actions, self._tags = actions, [f"<{name}>" for name in tool_names]
        self._session = Session()

    async def reset(self, prompt: Prompt) -> str:
        return ""  # unused: the role builds the prompt

    async def step(self, action: str) -> StepResult:
        if not any(tag in action for tag in self._tags):
            return StepResult(done=True)
        taken = await self._actions.handle(action, self._session)
        return StepResult(done=True, kept_chars=taken.kept_chars) if isinstance(taken, FinalAnswer) else taken

    async def close(self) -> None:
        await self._session.close()
