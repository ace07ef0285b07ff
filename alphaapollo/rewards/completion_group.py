"""Grade the completions of a prompt in one call, although their episodes end at different times."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

from alphaapollo.processes.time_limit import exclude_from_time_limit
from alphaapollo.types import Score
from alphaapollo.utils.heartbeat import HEARTBEAT

T = TypeVar("T")
ScorePosition = tuple[asyncio.Future[Sequence[Score]], int]  # scores of a call, and the position in them


class CompletionGroup:
    """Episodes of one prompt. Their completions are graded once each episode waits for its score or has ended."""

    current: ContextVar[CompletionGroup | None] = ContextVar("completion_group", default=None)

    def __init__(self, size: int):
        self._num_running, self._waiting = size, dict[asyncio.Future[ScorePosition], Any]()

    async def run(self, run_episode: Callable[..., Awaitable[T]], *arguments: object) -> T:
        """Run one of the group's episodes, in a task of its own."""
        self.current.set(self)
        try:
            return await run_episode(*arguments)
        finally:
            self._num_running -= 1
            self._grade_if_complete()

    async def grade(self, completion: Any, grade_all: Callable[[Sequence[Any]], Awaitable[Sequence[Score]]]) -> Score:
        """Wait for the other episodes, grade all completions in one call, and return the score of this one."""
        future: asyncio.Future[ScorePosition] = asyncio.get_running_loop().create_future()
        self._grade_all, self._waiting[future] = grade_all, completion
        self._grade_if_complete()
        try:
            with exclude_from_time_limit(), HEARTBEAT.record_call("wait for the prompt's other episodes"):
                scores, position = await future
                return (await asyncio.shield(scores))[position]
        finally:
            self._waiting.pop(future, None)

    def _grade_if_complete(self) -> None:
        if self._waiting and len(self._waiting) >= self._num_running:
            waiting, self._waiting = self._waiting, {}
            scores = asyncio.ensure_future(self._grade_all([*waiting.values()]))
            for position, future in enumerate(waiting):
                if not future.done():  # it is done if its episode was cancelled
                    future.set_result((scores, position))
