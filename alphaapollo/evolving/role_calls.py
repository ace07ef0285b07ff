"""How a role uses its model: one question, a conversation with tools, or an episode in the run's environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from alphaapollo.config.schema import EvolvingRole, EvolvingToolRole
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
from alphaapollo.evolving.model_calls import ModelCaller
from alphaapollo.evolving.model_clients import ModelCallError
from alphaapollo.evolving.roles import ModelReply, Role, RoleView, make_role
from alphaapollo.rollout.check_replies import check_first, check_messages, check_step
from alphaapollo.rollout.environment_calls import EnvironmentCaller
from alphaapollo.rollout.episode import ATTEMPTS
from alphaapollo.tools.base import Session
from alphaapollo.types import Message, Outcome, Prompt, Sampling, Score
from alphaapollo.utils.time_limit import TimeLimit


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
    """Calls roles on their models.

    Args:
        settings: the `roles` section by slot; slots without a plugin are skipped.
        max_tokens: of a reply, unless the role has its own limit.
        asks: how often a role is asked again if its reply cannot be read (evolving.asks).
        services: of the environment: its tools, and env.max_steps and env.episode_timeout, which also limit
            conversations with tools.

    Raises:
        ValueError: a plugin is not registered.
    """

    def __init__(
        self, models: ModelCaller, settings: Mapping[str, EvolvingRole], max_tokens: int, asks: int, services: Services
    ):
        self.models, self.roles, self._asks = models, make_roles(settings), asks
        self._settings, self._max_tokens, self._env = settings, max_tokens, services.config
        self._actions = make_action_handler(services)
        self._tools = [schema["function"] for schema in services.tools.schemas()] if services.tools else []
        self._environments = EnvironmentCaller()

    def model_of(self, slot: str, branch: str) -> str:
        """The model of a role: its own, or that of the branch."""
        return self._settings[slot].model or branch

    async def call(self, slot: str, branch: str, key: str, messages: Sequence[Message]) -> ModelReply:
        """One call with the model and the sampling parameters of a role. Raises as ModelCaller.call."""
        own = self._settings[slot]
        sampling = Sampling(own.max_tokens or self._max_tokens, own.temperature, own.top_p)
        return await self.models.call(self.model_of(slot, branch), slot, key, messages, sampling)

    async def ask(self, slot: str, branch: str, key: str, view: RoleView) -> RoleResult:
        """Ask a role until its reply can be read. key: what for, e.g. `p17.r2.b0.i1/verifier.0`.

        Raises:
            EvolutionStopped, ModelUnavailableError: as ModelCaller.call.
        """
        if slot not in self.roles:
            return RoleResult()
        own, role = self._settings[slot], self.roles[slot]
        tools = self._tools if isinstance(own, EvolvingToolRole) and own.tools else []
        messages = role.build(replace(view, tools="\n".join(map(describe_call, tools))))
        names, failure = [tool["name"] for tool in tools], ""
        for number in range(self._asks + 1):
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
        return RoleResult(failure=f"{slot}: no result after {self._asks + 1} attempts; the last: {failure}")

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
        transcript, limit = Transcript(), self._env.episode_timeout
        for attempt in range(1, ATTEMPTS + 1):
            transcript, clock = Transcript(), TimeLimit(limit)
            try:
                with wrap_environment_errors("making the environment"):
                    environment = make()
                try:
                    first = check_first(await self._environments.call(clock, environment, "reset", prompt))
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
        for turn in range(self._env.max_steps):
            transcript.reply = await self.call(slot, branch, f"{key}turn{turn}", transcript.messages)
            text = transcript.reply.text
            result = check_step(await self._environments.call(clock, environment, "step", text))
            text = text if result.kept_chars is None else text[: result.kept_chars]
            transcript.messages = [*transcript.messages, Message(role="assistant", content=text)]
            if result.done:
                transcript.done, transcript.score = True, result.score
                if result.score and result.score.outcome is Outcome.ENVIRONMENT_FAILED:
                    transcript.failure = result.score.reason
                return
            assert result.observation is not None
            if turn + 1 < self._env.max_steps:
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
