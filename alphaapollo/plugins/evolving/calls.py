"""Call the models of roles within the budget: one question, a conversation with tools, or an episode in the run's
environment.

`role` is a key of the config section `roles`, e.g. `verifier`. `branch_model` is the name of the model that answers if
the role's key `model` is not set.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

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
from alphaapollo.plugins.evolving.model_clients import ModelCallError, ModelClient
from alphaapollo.plugins.evolving.pool import ModelCall, Pool, Usage
from alphaapollo.plugins.evolving.roles import ROLES, ModelReply, Role, RoleView, make_user_chat
from alphaapollo.plugins.evolving.settings import (
    EvolvingBudget,
    EvolvingConfig,
    EvolvingRole,
    EvolvingToolRole,
    ServedModel,
)
from alphaapollo.processes.time_limit import TimeLimit
from alphaapollo.rollout.environment_replies import check_messages, check_reset_reply, check_step_reply
from alphaapollo.rollout.episode import MAX_ATTEMPTS, EnvironmentCaller
from alphaapollo.tools.base import Session
from alphaapollo.types import Message, Outcome, Prompt, Sampling, Score
from alphaapollo.utils.heartbeat import HEARTBEAT
from alphaapollo.utils.redaction import map_texts, replace_surrogates
from alphaapollo.utils.seeds import derive_seed

STOP = "STOP"  # name of the stop file in the run folder
MAX_ASKS = 3  # requests of a role until its reply can be read
MAX_FAILURES = 20  # consecutive failures of one model whose server is down; then the run stops


class EvolutionStopped(Exception):
    """Exception that ends the rounds of a run early; its text is the reason. Answers are still chosen and written."""


class ModelUnavailableError(ConnectionError):
    """Error after MAX_FAILURES consecutive failed calls of a model whose server is down."""


class Budget:
    """Admission control for model calls; belongs to one event loop.

    A call reserves its maximum usage before it starts, so calls in flight never exceed a limit.

    Args:
        limits: limits for all processes of the run together.
        pool: log of the calls that have ended.
        stop_file: file whose existence ends the run.
    """

    def __init__(self, limits: EvolvingBudget, pool: Pool, stop_file: Path):
        self._limits, self._pool, self._stop_file = limits, pool, stop_file
        self._in_flight: list[Usage] = []  # maximum usage of each call
        self._began = time.monotonic() - pool.seconds
        self._changed = asyncio.Condition()

    @property
    def seconds(self) -> float:
        """Seconds that the run has taken so far, including earlier starts."""
        return time.monotonic() - self._began

    @property
    def seconds_left(self) -> float | None:
        """Remaining time in seconds; None without a time limit."""
        return None if self._limits.seconds is None else self._limits.seconds - self.seconds

    @asynccontextmanager
    async def reserve(self, max_usage: Usage) -> AsyncIterator[None]:
        """Wait until a call with this maximum usage fits into the budget, and reserve it during the block, which logs
        the call. Raises EvolutionStopped if the stop file exists, or if the call does not fit and no call is in
        flight."""
        async with self._changed:
            while spent := self._find_spent_limit(max_usage):
                if spent == "seconds" or not self._in_flight:
                    raise EvolutionStopped(f"budget.{spent}={getattr(self._limits, spent):g} is spent")
                await self._changed.wait()
            self._in_flight.append(max_usage)
        try:
            yield
        finally:
            async with self._changed:
                self._in_flight.remove(max_usage)
                self._changed.notify_all()

    def _find_spent_limit(self, max_usage: Usage) -> str | None:
        if self._stop_file.exists():
            raise EvolutionStopped(f"the stop file {self._stop_file} exists")
        usage = vars(sum([*self._in_flight, max_usage], self._pool.total_usage)) | {"seconds": self.seconds}
        limits = self._limits.model_dump(exclude_none=True)
        return next((name for name, limit in limits.items() if usage[name] > limit), None)


def compute_call_price(model: ServedModel, tokens_read: int, tokens_written: int) -> float:
    """Return the price of one call, from models.NAME.price_in and price_out (per million tokens)."""
    return (tokens_read * model.price_in + tokens_written * model.price_out) / 1e6


@dataclass
class Transcript:
    """Messages of one episode, and how it ended."""

    messages: list[Message] = field(default_factory=list)
    num_prompt_messages: int = 0  # number of messages in the first prompt
    full_reply: ModelReply | None = None  # last reply, with the text that the environment ignored
    score: Score | None = None  # score by the environment; None: ended by the limit of turns, or without a score
    failure: str = ""  # reason if the environment failed

    @property
    def text(self) -> str:
        """Text of all messages after the prompt."""
        return "\n\n".join(message["content"] for message in self.messages[self.num_prompt_messages :])

    @property
    def last_message(self) -> str:
        """Last message of the model, cut after the part that the environment used; empty if there is none."""
        new_messages = self.messages[self.num_prompt_messages :]
        return next((message["content"] for message in reversed(new_messages) if message["role"] == "assistant"), "")


class RoleCaller:
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

    def get_model_name(self, role: str, branch_model: str) -> str:
        """Return the model name of a role: roles.SLOT.model, else the branch's model."""
        return self._settings[role].model or branch_model

    def derive_call_seed(self, call_key: str) -> int:
        return derive_seed(self._config.trainer.seed, "evolve", call_key)

    async def call_model(self, role: str, branch_model: str, call_key: str, messages: Sequence[Message]) -> ModelReply:
        """Return one reply of a role's model, from the pool if the same request with this call_key succeeded before.

        Raises:
            ModelCallError: the call failed; the failure is logged.
            EvolutionStopped: the call does not fit the budget, or budget.seconds ends during the call.
            ModelUnavailableError: MAX_FAILURES consecutive calls failed.
        """
        settings, model = self._settings[role], self.get_model_name(role, branch_model)
        max_tokens = settings.max_tokens or self._config.data.max_response_length
        sampling = Sampling(max_tokens, settings.temperature, settings.top_p, seed=self.derive_call_seed(call_key))
        messages = map_texts(list(messages), replace_surrogates)  # e.g. of a tool's result
        digest = hashlib.blake2b(msgspec.json.encode([model, messages, sampling]), digest_size=8).hexdigest()
        logged = self._pool.calls.get(call_key)
        if logged and logged.digest == digest and not logged.failure:
            return ModelReply(logged.text, logged.seed, logged.prompt_tokens, logged.tokens, logged.stop)
        call = ModelCall(call_key, role, model, digest, sampling.seed)
        characters = sum(len(message["content"]) for message in messages)  # about as many tokens, or more
        return await self.log_call(
            call, characters, max_tokens, lambda: self.clients[model].generate(messages, sampling, call_key)
        )

    async def log_call(
        self, call: ModelCall, max_prompt_tokens: int, max_tokens: int, generate: Callable[[], Awaitable[ModelReply]]
    ) -> ModelReply:
        """Generate a reply as soon as its maximum usage fits the budget, and log the call. Raises like `call_model`."""
        model, settings, budget = call.model, self._config.models[call.model], self._budget
        price = compute_call_price(settings, max_prompt_tokens, max_tokens)
        reply, failure = ModelReply("", call.seed), None
        async with self._concurrency[model], budget.reserve(Usage(1, max_prompt_tokens + max_tokens, price)):
            started = time.perf_counter()
            try:
                with HEARTBEAT.record_call("a reply", f"models.{model}", self.clients[model].time_limit):
                    async with asyncio.timeout(budget.seconds_left):
                        reply = await generate()
            except ModelCallError as error:
                failure = error
            except TimeoutError as error:
                raise EvolutionStopped("budget.seconds ran out while a call was in flight") from error
            ended = msgspec.structs.replace(
                call,
                seed=reply.seed,
                time=round(budget.seconds, 3),
                seconds=round(time.perf_counter() - started, 4),
                text=reply.text,
                prompt_tokens=reply.prompt_tokens,
                tokens=reply.completion_tokens,
                money=compute_call_price(settings, reply.prompt_tokens, reply.completion_tokens),
                stop=reply.stop_reason,
                failure=str(failure or ""),
            )
            record = self._pool.append(ended)
        if failure is None:
            self._failures_in_a_row[model] = 0
            return replace(reply, text=record.text)  # as a resumed run reads it
        self._failures_in_a_row[model] += failure.server_down
        if (count := self._failures_in_a_row[model]) < MAX_FAILURES:
            raise failure
        raise ModelUnavailableError(
            f"models.{model}: {count} calls in a row failed. Last error: {failure}. No result is lost. Fix the "
            "server, then run the same command again."
        ) from failure

    async def ask_role(
        self, role: str, branch_model: str, call_key_prefix: str, view: RoleView
    ) -> tuple[Any, tuple[Message, ...], str]:
        """Ask a role until its reply can be read, at most MAX_ASKS times. Returns the result of its `read`, its prompt
        and, if there is no result, why. A disabled role has no result. Raises like `call_model`.
        call_key_prefix: prefix of the call keys, e.g. `p17.r2.b0.i1/verifier.0`."""
        if role not in self.roles:
            return None, (), f"the role {role} is disabled"
        settings, plugin = self._settings[role], self.roles[role]
        tools = self._tools if isinstance(settings, EvolvingToolRole) and settings.tools else []
        messages = plugin.build(replace(view, tools="\n".join(map(describe_tool, tools))))
        tags, failure = [f"<{tool['name']}>" for tool in tools], ""
        for number in range(MAX_ASKS):
            try:
                transcript = await self.run_episode(
                    role,
                    branch_model,
                    f"{call_key_prefix}/ask{number}.",
                    lambda: ToolConversation(self._actions, tags),
                    Prompt(id=0, data_source="", content=""),
                    lambda first: messages,
                )
            except ModelCallError as error:
                failure = str(error)
                continue
            if transcript.failure or transcript.full_reply is None:
                failure = transcript.failure
            elif (value := plugin.read(transcript.full_reply)) is not None:
                return value, tuple(messages), ""
            else:
                failure = f"the reply could not be read: {' '.join(transcript.full_reply.text.split())[-120:]!r}"
        return None, (), f"{role}: no result after {MAX_ASKS} attempts. Last failure: {failure}"

    async def run_episode(
        self,
        role: str,
        branch_model: str,
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
                    reply_to_reset = await self._environments.call(clock, environment, "reset", prompt)
                    first = check_reset_reply(reply_to_reset, self._config.data.system_prompt)
                    built = build_prompt(make_user_chat(first) if isinstance(first, str) else list(first))
                    transcript.messages = check_messages(built, f"{role}.build")
                    transcript.num_prompt_messages = len(built)
                    for turn in range(self._config.env.max_steps):
                        call_key = f"{call_key_prefix}turn{turn}"
                        reply = await self.call_model(role, branch_model, call_key, transcript.messages)
                        transcript.full_reply = reply
                        result = check_step_reply(await self._environments.call(clock, environment, "step", reply.text))
                        text = reply.text if result.kept_chars is None else reply.text[: result.kept_chars]
                        transcript.messages = [*transcript.messages, Message(role="assistant", content=text)]
                        if result.done:
                            transcript.score = result.score
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
    return {role: ROLES.get(setting.plugin)() for role, setting in settings.items() if setting.plugin}


class ToolConversation:
    """Environment that runs the tool calls of a role. A reply without a tool call ends the episode."""

    def __init__(self, actions: ActionHandler, tags: Sequence[str]):
        self._actions, self._tags, self._session = actions, tags, Session()

    async def reset(self, prompt: Prompt) -> str:
        return ""  # unused: the role builds the prompt

    async def step(self, action: str) -> StepResult:
        if not any(tag in action for tag in self._tags):
            return StepResult(done=True)
        taken = await self._actions.handle(action, self._session)
        return StepResult(done=True, kept_chars=taken.kept_chars) if isinstance(taken, FinalAnswer) else taken

    async def close(self) -> None:
        await self._session.close()
