"""Client of the grader processes: scores a completion, retries a failed grade, and never fails the run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from alphaapollo.config.schema import CustomRewardFunction, Reward
from alphaapollo.observability.spans import SPANS
from alphaapollo.rewards.base import failed_score
from alphaapollo.rewards.grader_processes.pool import GraderError, GraderPool
from alphaapollo.rewards.grader_processes.protocol import decode_reply, encode_request
from alphaapollo.types import Prompt, Score, Turn
from alphaapollo.utils.time_limit import exclude_waiting

MAX_ATTEMPTS = 2  # for one completion


class RewardClient:
    """Computes the reward of a run: the custom reward function, or the built-in grader of the prompt's data source.

    `reward.components` are added to it (see `components.add_components`).
    """

    def __init__(self, reward: Reward, custom: CustomRewardFunction):
        self._pool = GraderPool(reward, custom)

    async def start(self) -> None:
        """Start the grader processes (GraderError, a ValueError: a function or a component cannot be loaded)."""
        await self._pool.start()

    async def score(self, prompt: Prompt, text: str, turns: Sequence[Turn] = ()) -> Score:
        """Score one completion; after MAX_ATTEMPTS failures, return outcome GRADER_FAILED and reward NaN.

        `turns` is the episode so far, for functions that take a trajectory; without it, the text is the only turn.
        Never raises because of a reward function.
        """
        try:
            request = encode_request(prompt, text, turns if self._pool.takes_turns else ())
        except (TypeError, ValueError) as error:
            return failed_score(f"the trajectory cannot be sent to the reward function as JSON: {error}")
        for _ in range(MAX_ATTEMPTS):
            try:
                with exclude_waiting(), SPANS("grade", within=self._pool.max_job_seconds):
                    score = decode_reply(await self._pool.run(request))
            except GraderError as error:
                score = failed_score(str(error))
            if not score.outcome.failed:
                break
        return score

    async def close(self) -> None:
        """Kill the grader processes."""
        await self._pool.close()


def check_reward_function(reward: Reward, custom: CustomRewardFunction) -> None:
    """Check at startup that a grader process can load the user's files and all components.

    Raises:
        ValueError: as `load_reward_function`, an unknown component, or an import that hangs or ends the process.
    """

    async def start_once() -> None:
        client = RewardClient(reward, custom)
        try:
            await client.start()
        finally:
            await client.close()

    asyncio.run(start_once())
