"""Use a reward client in a test."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from alphaapollo.config.schema import CustomRewardFunction, Reward
from alphaapollo.rewards.grader_processes.client import RewardClient

T = TypeVar("T")


def with_client(
    scenario: Callable[[RewardClient], Awaitable[T]],
    reward: Reward | None = None,
    path: str = "",
    name: str = "f",
    starts: bool = True,
) -> T:
    """Run `scenario(client)` with a started client, and close the client."""

    async def main() -> T:
        client = RewardClient(reward or Reward(), CustomRewardFunction(path=path, name=name))
        if starts:
            await client.start()
        try:
            return await scenario(client)
        finally:
            await client.close()

    return asyncio.run(main())
