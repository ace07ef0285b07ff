"""The evolution loop: rounds over all problems, then a choice for each problem.

Each round covers all problems before the next one starts, so an exhausted budget leaves all problems at the same
round. Each step first looks for its result in the pool, so a resumed run repeats the loop and makes only missing calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from alphaapollo.config.schema import Evolving
from alphaapollo.evolving.budget import Budget, EvolutionStopped, gather_all
from alphaapollo.evolving.pool import CandidateId
from alphaapollo.evolving.proposal import Solver
from alphaapollo.evolving.selection import AnswerSelector, JudgedCandidate, recall
from alphaapollo.evolving.verification import VerifierPanel
from alphaapollo.types import Prompt


@dataclass(frozen=True)
class EvolutionLoop:
    """One run over its problems.

    Args:
        branches: the model of each branch.
        solutions: of one branch, in one round.
        on_round: called with the round number after each round, including one that was cut short.
    """

    settings: Evolving
    branches: Sequence[str]
    solutions: int
    budget: Budget
    solver: Solver
    panel: VerifierPanel
    selector: AnswerSelector
    on_round: Callable[[int], None]

    async def run(self, prompts: Sequence[Prompt]) -> str:
        """Run all rounds and choose an answer for each problem. Returns why the run ended early, or an empty string."""
        stopped = ""
        for number in range(self.settings.rounds):
            try:
                await gather_all([self._run_round(prompt, number) for prompt in prompts])
            except EvolutionStopped as reason:
                stopped = str(reason)
            self.on_round(number)
            if stopped:
                break
        self.budget.release_reserve()
        reasons = await gather_all([self.selector.choose(prompt) for prompt in prompts])
        return stopped or next(filter(None, reasons), "")

    async def _run_round(self, prompt: Prompt, number: int) -> None:
        settings = self.settings
        past = recall(self.solver.pool, prompt.id, number, settings.memory_size, settings.memory_type)
        await gather_all(
            [
                self._make_candidate(prompt, CandidateId(prompt.id, number, branch, index), model, past)
                for branch, model in enumerate(self.branches)
                for index in range(self.solutions)
            ]
        )

    async def _make_candidate(
        self, prompt: Prompt, place: CandidateId, branch: str, past: Sequence[JudgedCandidate]
    ) -> None:
        candidate = await self.solver.solve(prompt, place, branch, past)
        if not candidate.failure:
            await self.panel.judge(prompt, candidate, branch)
