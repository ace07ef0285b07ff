"""Evolution loop: several rounds of solving all problems, then the choice of one answer per problem.

A round covers all problems before the next round starts, so all problems are in the same round when the budget ends.
Each step first looks for its result in the pool, so a resumed run repeats the loop and makes only the missing calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from alphaapollo.config.schema import Evolving
from alphaapollo.environments.memory import MemoryType, Step, select_steps
from alphaapollo.evolving.budget import EvolutionStopped, gather_all
from alphaapollo.evolving.candidates import CandidateMaker
from alphaapollo.evolving.pool import Candidate, CandidateId, ChosenCandidate, JudgedCandidate, Pool
from alphaapollo.types import Message, Prompt


@dataclass(frozen=True)
class EvolutionLoop:
    """Evolution loop of one run.

    Args:
        branches: model name of each branch.
        num_solutions: number of solutions per problem, branch and round.
        on_round: function called with the round number after each round, also after an incomplete round.
        on_solution: function called after each solution, also if the pool already had it.
    """

    settings: Evolving
    branches: Sequence[str]
    num_solutions: int
    pool: Pool
    candidates: CandidateMaker
    on_round: Callable[[int], None]
    on_solution: Callable[[], None]

    async def run(self, prompts: Sequence[Prompt]) -> str:
        """Run all rounds and choose an answer per problem. Returns why the rounds ended early, or an empty string."""
        stopped = ""
        for number in range(self.settings.rounds):
            try:
                await gather_all([self._run_problem_round(prompt, number) for prompt in prompts])
            except EvolutionStopped as reason:
                stopped = str(reason)
            self.on_round(number)
            if stopped:
                break
        for prompt in prompts:
            self._choose_answer(prompt)
        return stopped

    async def _run_problem_round(self, prompt: Prompt, round_number: int) -> None:
        settings = self.settings
        past = select_past_solutions(self.pool, prompt.id, round_number, settings.memory_size, settings.memory_type)

        async def solve(candidate_id: CandidateId, model: str) -> None:
            await self.candidates.propose_and_judge(prompt, candidate_id, model, past)
            self.on_solution()

        await gather_all(
            [
                solve(CandidateId(prompt.id, round_number, branch, i), model)
                for branch, model in enumerate(self.branches)
                for i in range(self.num_solutions)
            ]
        )

    def _choose_answer(self, prompt: Prompt) -> None:
        ranked = rank_candidates(self.pool, prompt.id)
        choice = ChosenCandidate(prompt.id, ranked[0].key if ranked else None)
        if self.pool.choices.get(prompt.id) != choice:
            self.pool.append(choice)


def select_past_solutions(
    pool: Pool, problem: int, before_round: int, count: int, memory_type: MemoryType
) -> list[JudgedCandidate]:
    """Select at most `count` candidates of earlier rounds for a proposer's prompt. Returns the oldest first."""
    if count == 0:
        return []
    judged = pool.get_judged_candidates(problem, before_round)
    steps = [
        Step(candidate.summary, [Message(role="user", content=judgement.report)], judgement.share_of_votes)
        for candidate, judgement in judged
    ]
    chosen = {id(step) for step in select_steps(steps, count, memory_type)}
    return [one for step, one in zip(steps, judged, strict=True) if id(step) in chosen]


def rank_candidates(pool: Pool, problem: int, before_round: int | None = None) -> list[Candidate]:
    """Return judged candidates of rounds < before_round, best first: highest vote share, shortest summary, oldest."""
    judged = pool.get_judged_candidates(problem, before_round)
    order = sorted(judged, key=lambda one: (-one[1].share_of_votes, len(one[0].summary)))
    return [candidate for candidate, _ in order]
