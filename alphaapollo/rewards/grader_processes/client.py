"""From a prompt and a completion to a Score, through graders that cannot hurt the run."""

from __future__ import annotations

from collections.abc import Sequence

from alphaapollo.config.schema import Judge
from alphaapollo.observability.spans import SPANS
from alphaapollo.rewards.base import failure
from alphaapollo.rewards.grader_processes.pool import GraderError, GraderPool
from alphaapollo.rewards.grader_processes.protocol import Grading, decode_reply, encode_request
from alphaapollo.types import Prompt, Score, Turn
from alphaapollo.utils.time_limit import queueing

ATTEMPTS = 2  # a failure is tried once more


class RewardClient:
    """The reward of the run: the user's function, or without one the built-in grader of each prompt's data source, and
    the components added to it (see components.combine).

    Args:
        custom_path: Python file with the user's function; empty = none.
        custom_name: its name.
        timeout: seconds it may take for one completion.
        num_workers: processes that grade.
        components: their weights by name; empty = none.
        required: components that must be above 0, or the whole reward is 0.
        judge: who judges the data sources that are judged.
        custom_module: Python file that registers components; empty = none.
    """

    def __init__(
        self,
        custom_path: str,
        custom_name: str,
        timeout: float,
        num_workers: int,
        components: dict[str, float],
        required: Sequence[str],
        judge: Judge | None = None,
        custom_module: str = "",
    ):
        settings = judge.model_dump() if judge else {}
        grading = Grading(custom_path, custom_name, components, required, settings, custom_module)
        self._pool = GraderPool(grading, timeout, num_workers)

    async def start(self) -> None:
        """Start the graders (ValueError: the user's function cannot be imported, or a component is not known)."""
        try:
            await self._pool.start()
        except GraderError as error:
            raise ValueError(str(error)) from error

    async def score(self, prompt: Prompt, text: str, turns: Sequence[Turn] = ()) -> Score:
        """What the reward function says; where it fails twice, a Score with outcome GRADER_FAILED and reward NaN.

        `turns` are those of the episode so far, for functions that take a trajectory; without them the text is the one
        turn. Never raises for what a reward function does.
        """
        try:
            request = encode_request(prompt, text, turns if self._pool.takes_turns else ())
        except (TypeError, ValueError) as error:
            return failure(f"the trajectory cannot be given to the reward function: {error}")
        for _ in range(ATTEMPTS):
            try:
                with queueing(), SPANS("grade", within=self._pool.longest):  # a grader has a time limit of its own
                    reply = await self._pool.run(request)
                score = decode_reply(reply)
            except GraderError as error:
                score = failure(str(error))
            if not score.outcome.failed:
                break
        return score

    async def close(self) -> None:
        """Kill the graders."""
        await self._pool.close()
