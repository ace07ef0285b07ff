"""Who plays which role, with which model, and how a role is performed until it has what is wanted of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from alphaapollo.config.schema import Role as Settings
from alphaapollo.config.schema import Roles, ToolRole
from alphaapollo.environments.base import Actions
from alphaapollo.environments.informal_math import how_to_call
from alphaapollo.evolving.asker import Asker, Said
from alphaapollo.evolving.client import CallFailed
from alphaapollo.evolving.play import Limits, Talk, play
from alphaapollo.evolving.roles import Role, View, make_role
from alphaapollo.rollout.sync_calls import SyncCalls
from alphaapollo.tools.toolbox import ToolBox
from alphaapollo.types import Message, Prompt, Sampling

Slot = Literal["proposer", "summariser", "verifier", "verifier_of_verifiers", "aggregator", "referee"]


class NoResult(Exception):
    """A role was asked as often as it may be, and what is wanted did not come; says what came last."""


@dataclass(frozen=True)
class Actor:
    """One slot, filled."""

    slot: Slot
    role: Role[Any]
    model: str  # empty: that of the branch
    sampling: Sampling
    tools: bool

    def model_for(self, branch: str) -> str:
        return self.model or branch


@dataclass(frozen=True)
class Performed:
    """What a role came to."""

    value: Any  # of the type that the slot wants
    messages: tuple[Message, ...]  # what it was asked


class Cast:
    """Args:
    actors: by their slots; a slot that nobody fills is missing.
    asks: how often a role is asked again.
    limits: of one episode with tools.
    """

    def __init__(
        self,
        asker: Asker,
        actors: Mapping[Slot, Actor],
        asks: int,
        limits: Limits,
        toolbox: ToolBox | None,
        actions: Actions | None,
        sync_calls: SyncCalls,
    ):
        self.asker, self.sync_calls, self.limits = asker, sync_calls, limits
        self._actors, self._asks = actors, asks
        self._actions, self._names = actions, toolbox.names if toolbox else []
        schemas = toolbox.schemas() if toolbox else []
        self._how_to_call = "\n".join(how_to_call(schema["function"]) for schema in schemas)

    def __contains__(self, slot: Slot) -> bool:
        return slot in self._actors

    def __getitem__(self, slot: Slot) -> Actor:
        return self._actors[slot]

    async def perform(self, slot: Slot, unit: str, view: View, branch: str, prompt: Prompt) -> Performed:
        """Ask until the role has read what it wants. unit: what for, e.g. `p17.r2.b0.i1/verifier.0`.

        Raises:
            NoResult: it did not come. Halt, ModelDown: as Asker.ask.
        """
        actor = self._actors[slot]
        model, use_tools = actor.model_for(branch), actor.tools and bool(self._names)
        messages = actor.role.build(View(**{**vars(view), "tools": self._how_to_call if use_tools else ""}))
        problem = ""
        for number in range(self._asks + 1):
            try:
                said = await self._talk(actor, model, f"{unit}/ask{number}", messages, use_tools, prompt)
            except (CallFailed, NoResult) as error:
                problem = str(error)
                continue
            if (value := actor.role.read(said)) is not None:
                return Performed(value, tuple(messages))
            problem = f"a reply without what is wanted: {' '.join(said.text.split())[-120:]!r}"
        raise NoResult(f"{slot}, asked {self._asks + 1} times: {problem}")

    async def _talk(
        self, actor: Actor, model: str, key: str, messages: Sequence[Message], use_tools: bool, prompt: Prompt
    ) -> Said:
        """The last words of one conversation."""
        last: Said | None = None

        async def reply(chat: list[Message], turn: int) -> str:
            nonlocal last
            last = await self.asker.ask(model, actor.slot, f"{key}.turn{turn}", chat, actor.sampling)
            return last.text

        limits = self.limits if use_tools else Limits(1, self.limits.seconds)
        actions = self._actions if use_tools else None
        played = await play(lambda: Talk(messages, actions, self._names), prompt, list, reply, limits, self.sync_calls)
        if played.failure:
            raise NoResult(played.failure)
        assert last is not None
        return last


def fill(roles: Roles, max_tokens: int) -> dict[Slot, Actor]:
    """The slots that are filled (ValueError: a role that is not registered). max_tokens: of a reply by default."""
    settings: dict[Slot, Settings] = {
        "proposer": roles.proposer,
        "summariser": roles.summariser,
        "verifier": roles.verifier,
        "verifier_of_verifiers": roles.verifier_of_verifiers,
        "aggregator": roles.aggregator,
        "referee": roles.referee,
    }
    return {
        slot: Actor(
            slot,
            make_role(own.plugin),
            own.model,
            Sampling(own.max_tokens or max_tokens, own.temperature, own.top_p),
            tools=isinstance(own, ToolRole) and own.tools,
        )
        for slot, own in settings.items()
        if own.plugin
    }
