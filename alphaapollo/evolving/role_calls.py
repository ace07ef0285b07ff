"""How a role uses its model: one question, a conversation with tools, or an episode in the run's environment."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from alphaapollo.config.schema import EvolvingRole, EvolvingToolRole
from alphaapollo.environments.actions import make_action_handler
from alphaapollo.environments.base import (
    ActionHandler,
    Environment,
    EnvironmentFailure,
    FinalAnswer,
    Observation,
    Services,
    StepResult,
    wrap_environment_errors,
)
from alphaapollo.environments.informal_math import describe_call
from alphaapollo.evolving.model_calls import ModelCaller
from alphaapollo.evolving.model_clients import ModelCallError
from alphaapollo.evolving.roles import ModelReply, Role, RoleView, make_role
from alphaapollo.rollout.check_replies import check_first, check_messages, check_step
from alphaapollo.rollout.environment_calls import call_environment, close_environment
from alphaapollo.rollout.episode import ATTEMPTS, EpisodeLimits
from alphaapollo.rollout.sync_method_threads import SyncMethodThreads
from alphaapollo.tools.base import Session
from alphaapollo.types import Message, Outcome, Prompt, Sampling, Score
from alphaapollo.utils.time_limit import TimeLimit

GetReply = Callable[[list[Message], int], Awaitable[str]]
"""(messages so far, turn number) -> the model's text."""


@dataclass
class Transcript:
    """One episode in messages."""

    messages: list[Message] = field(default_factory=list)
    num_prompt_messages: int = 0  # how many of them are the first prompt
    score: Score | None = None  # given by the environment
    done: bool = False  # the environment ended the episode, rather than a limit
    failure: str = ""  # of the environment

    @property
    def text(self) -> str:
        """Everything after the prompt."""
        return "\n\n".join(message["content"] for message in self.messages[self.num_prompt_messages :])

    @property
    def last_reply(self) -> str:
        """The model's last message; empty if there is none."""
        own = self.messages[self.num_prompt_messages :]
        return next((message["content"] for message in reversed(own) if message["role"] == "assistant"), "")


@dataclass(frozen=True)
class RoleResult:
    """What a role returned."""

    value: Any  # what the role's `read` returned; None if no reply could be read
    messages: tuple[Message, ...]  # its prompt
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
        self,
        models: ModelCaller,
        settings: Mapping[str, EvolvingRole],
        max_tokens: int,
        asks: int,
        services: Services,
    ):
        self.models, self.roles, self._asks = models, make_roles(settings), asks
        self._settings, self._max_tokens, self._tools = settings, max_tokens, services.tools
        self._limits = EpisodeLimits(services.config.max_steps, services.config.episode_timeout)
        self._actions = make_action_handler(services) if self._tools else None
        schemas = self._tools.schemas() if self._tools else []
        self._tool_help = "\n".join(describe_call(schema["function"]) for schema in schemas)
        self._threads = SyncMethodThreads()

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
        own, role = self._settings[slot], self.roles[slot]
        use_tools = isinstance(own, EvolvingToolRole) and own.tools and bool(self._tool_help)
        messages, failure = role.build(replace(view, tools=self._tool_help if use_tools else "")), ""
        for number in range(self._asks + 1):
            try:
                reply = await self._converse(slot, branch, f"{key}/ask{number}", messages, use_tools)
            except (ModelCallError, EnvironmentFailure) as error:
                failure = str(error)
                continue
            if (value := role.read(reply)) is not None:
                return RoleResult(value, tuple(messages))
            failure = f"the reply could not be read: {' '.join(reply.text.split())[-120:]!r}"
        return RoleResult(None, (), f"{slot}: no result after {self._asks + 1} attempts; the last: {failure}")

    async def _converse(self, slot: str, branch: str, key: str, messages: list[Message], use_tools: bool) -> ModelReply:
        """The last reply of one conversation. Raises EnvironmentFailure if a tool fails."""
        if not use_tools:
            return await self.call(slot, branch, f"{key}.turn0", check_messages(messages, f"{slot}.build"))
        replies: list[ModelReply] = []

        async def reply(chat: list[Message], turn: int) -> str:
            replies.append(await self.call(slot, branch, f"{key}.turn{turn}", chat))
            return replies[-1].text

        assert self._tools is not None and self._actions is not None
        actions, names = self._actions, self._tools.names
        prompt = Prompt(id=0, data_source="", content=messages)
        transcript = await self.run_episode(lambda: ToolConversation(actions, names), prompt, list, reply)
        if transcript.failure:
            raise EnvironmentFailure(transcript.failure)
        return replies[-1]

    async def run_episode(
        self,
        make: Callable[[], Environment],
        prompt: Prompt,
        build: Callable[[list[Message]], list[Message]],
        reply: GetReply,
    ) -> Transcript:
        """Run one episode in messages; rollout/episode.py is the variant in tokens, for training.

        A failed environment is replaced once. The pool has the earlier replies, so no call is repeated.

        Args:
            build: from the environment's first messages to the model's prompt.
            reply: from the messages so far and the turn number to the model's text.
        """
        transcript = Transcript()
        for attempt in range(1, ATTEMPTS + 1):
            transcript, clock = Transcript(), TimeLimit(self._limits.seconds)
            try:
                with wrap_environment_errors("making the environment"):
                    environment = make()
                try:
                    first = check_first(await call_environment(self._threads, clock, environment, "reset", prompt))
                    transcript.messages = build(
                        [Message(role="user", content=first)] if isinstance(first, str) else list(first)
                    )
                    transcript.num_prompt_messages = len(transcript.messages)
                    await self._take_turns(transcript, environment, clock, reply)
                    return transcript
                finally:
                    await close_environment(self._threads, environment)
            except TimeoutError:
                transcript.failure = f"the environment took longer than env.episode_timeout={self._limits.seconds:g} s"
                return transcript
            except EnvironmentFailure as error:
                transcript.failure = f"{error} (attempt {attempt} of {ATTEMPTS})"
        return transcript

    async def _take_turns(
        self,
        transcript: Transcript,
        environment: Environment,
        clock: TimeLimit,
        reply: GetReply,
    ) -> None:
        for turn in range(self._limits.max_turns):
            text = await reply(transcript.messages, turn)
            result = check_step(await call_environment(self._threads, clock, environment, "step", text))
            text = text if result.kept_chars is None else text[: result.kept_chars]
            transcript.messages = [*transcript.messages, Message(role="assistant", content=text)]
            if result.done:
                transcript.done, transcript.score = True, result.score
                if result.score and result.score.outcome is Outcome.ENVIRONMENT_FAILED:
                    transcript.failure = result.score.reason
                return
            assert result.observation is not None
            if turn + 1 < self._limits.max_turns:
                transcript.messages = [*transcript.messages, *result.observation.messages]


def make_roles(settings: Mapping[str, EvolvingRole]) -> dict[str, Role[Any]]:
    """The role of each slot that has a plugin. Raises ValueError for a plugin that is not registered."""
    return {slot: make_role(own.plugin) for slot, own in settings.items() if own.plugin}


class ToolConversation:
    """Environment in which a role answers its prompt with the help of tools: a reply without a tool call ends it."""

    def __init__(self, actions: ActionHandler, tool_names: Sequence[str]):
        self._actions, self._tags = actions, [f"<{name}>" for name in tool_names]
        self._session = Session()

    async def reset(self, prompt: Prompt) -> Observation:
        assert not isinstance(prompt.content, str)
        return Observation(prompt.content)

    async def step(self, action: str) -> StepResult:
        if not any(tag in action for tag in self._tags):
            return StepResult(done=True)
        taken = await self._actions.handle(action, self._session)
        return StepResult(done=True, kept_chars=taken.kept_chars) if isinstance(taken, FinalAnswer) else taken

    async def close(self) -> None:
        await self._session.close()
