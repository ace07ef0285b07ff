"""The loop. Round by round over all problems, so that a budget that ends leaves them all equally far:

    memory -> every branch's solutions, each solved and judged -> memory -> ... -> a choice a problem

Every step first looks into the pool, so a run that was killed goes through the same motions and asks only for what is
not there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from alphaapollo.environments.memory import MemoryType
from alphaapollo.evolving.budget import Budget, Halt
from alphaapollo.evolving.halting import all_settled
from alphaapollo.evolving.judging import Judge
from alphaapollo.evolving.memory import Remembered, recall
from alphaapollo.evolving.pool import Pool
from alphaapollo.evolving.records import Place
from alphaapollo.evolving.selection import Selector
from alphaapollo.evolving.solving import Solver
from alphaapollo.types import Prompt


@dataclass(frozen=True)
class Shape:
    """How much is made."""

    rounds: int
    branches: tuple[str, ...]  # the model of each
    solutions: int  # of a branch in a round
    memory_size: int
    memory_type: MemoryType


class Evolution:
    """One run over its problems. `told` is called after each round, and for one that was cut short."""

    def __init__(
        self,
        shape: Shape,
        pool: Pool,
        budget: Budget,
        solver: Solver,
        judge: Judge,
        selector: Selector,
        told: Callable[[int], None],
    ):
        self._shape, self._pool, self._budget = shape, pool, budget
        self._solver, self._judge, self._selector, self._told = solver, judge, selector, told

    async def evolve(self, prompts: Sequence[Prompt]) -> str:
        """All rounds, then a choice for each problem. Returns why it ended early; empty: it did not."""
        halted = ""
        for number in range(self._shape.rounds):
            try:
                await all_settled([self._round(prompt, number) for prompt in prompts])
            except Halt as reason:
                halted = str(reason)
            self._told(number)
            if halted:
                break
        self._budget.open_reserve()
        ends = await all_settled([self._finish(prompt) for prompt in prompts])
        return halted or next(filter(None, ends), "")

    async def _finish(self, prompt: Prompt) -> str:
        """Choose; where the calls for a tournament may not be made, by vote. Returns why."""
        try:
            await self._selector.choose(prompt)
        except Halt as reason:
            self._selector.by_vote(prompt.id)
            return str(reason)
        return ""

    async def _round(self, prompt: Prompt, number: int) -> None:
        shape = self._shape
        past = recall(self._pool, prompt.id, number, shape.memory_size, shape.memory_type)
        await all_settled(
            [
                self._candidate(prompt, Place(prompt.id, number, branch, index), model, past)
                for branch, model in enumerate(shape.branches)
                for index in range(shape.solutions)
            ]
        )

    async def _candidate(self, prompt: Prompt, place: Place, model: str, past: Sequence[Remembered]) -> None:
        candidate = await self._solver.solve(prompt, place, model, past)
        if not candidate.failure:
            await self._judge.judge(prompt, candidate, model)
