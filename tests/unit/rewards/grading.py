"""Grader processes in tests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from alphaapollo.config.schema import CustomRewardFunction, Reward
from alphaapollo.rewards.grader_processes.client import RewardClient
from alphaapollo.types import Prompt, Score, Turn

T = TypeVar("T")


class Graders:
    """Reward client with an event loop of its own, so that several tests can use the same grader processes."""

    def __init__(self, reward: Reward, custom: CustomRewardFunction):
        self._runner = asyncio.Runner()
        self.client = RewardClient(reward, custom)

    def run(self, scenario: Callable[[RewardClient], Awaitable[T]]) -> T:
        async def main() -> T:
            return await scenario(self.client)

        return self._runner.run(main())

    def score(self, prompt: Prompt, texts: Iterable[str], turns: Sequence[Turn] = ()) -> list[Score]:
        """Score texts at the same time."""

        async def grade_all(client: RewardClient) -> list[Score]:
            return await asyncio.gather(*(client.score(prompt, text, turns) for text in texts))

        return self.run(grade_all)

    def close(self) -> None:
        with self._runner:
            self._runner.run(self.client.close())


@contextmanager
def open_graders(
    reward: Reward | None = None, path: object = "", name: str | list[str] = "f", starts: bool = True
) -> Iterator[Graders]:
    """Context manager with a started client, which is closed at the end."""
    graders = Graders(reward or Reward(), CustomRewardFunction(path=str(path), name=name))
    try:
        if starts:
            graders.run(lambda client: client.start())
        yield graders
    finally:
        graders.close()


def with_client(scenario: Callable[[RewardClient], Awaitable[T]], *arguments: object, **settings: object) -> T:
    """Return `scenario(client)` of graders that only this call uses."""
    with open_graders(*arguments, **settings) as graders:  # type: ignore[arg-type]
        return graders.run(scenario)
