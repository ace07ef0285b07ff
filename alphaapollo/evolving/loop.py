"""Evolution loop: several rounds of solving all problems, then the choice of one answer per problem.

A round covers all problems before the next round starts, so all problems are in the same round when the budget ends.
Each step first looks for its result in the pool, so a resumed run repeats the loop and makes only the missing calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from alphaapollo.config.schema import Evolving
from alphaapollo.environments.informal_math import get_problem
from alphaapollo.environments.memory import MemoryType, Step, select_steps
from alphaapollo.evolving.budget import Budget, EvolutionStopped, gather_all
from alphaapollo.evolving.candidates import CandidateMaker
from alphaapollo.evolving.pool import Candidate, CandidateId, ChosenCandidate, JudgedCandidate, Match, Pool
from alphaapollo.evolving.roles import RoleView
from alphaapollo.types import Message, Prompt


@dataclass(frozen=True)
class EvolutionLoop:
    """Evolution loop of one run.

    Args:
        branches: model name of each branch. The referee uses the first one, unless roles.referee.model is set.
        num_solutions: number of solutions per problem, branch and round.
        on_round: function called with the round number after each round, also after an incomplete round.
        on_solution: function called after each solution, also if the pool already had it.
    """

    settings: Evolving
    branches: Sequence[str]
    num_solutions: int
    pool: Pool
    budget: Budget
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
        self.budget.release_selection_reserve()
        reasons = await gather_all([self._choose_answer(prompt) for prompt in prompts])
        return stopped or next(filter(None, reasons), "")

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

    async def _choose_answer(self, prompt: Prompt) -> str:
        """Choose and record the answer of a problem, by votes or by a tournament. If the tournament is stopped early,
        the answer is chosen by votes and the reason for the stop is returned. Otherwise returns an empty string."""
        ranked, stopped = rank_candidates(self.pool, prompt.id), ""
        choice = ChosenCandidate(prompt.id, ranked[0].key if ranked else None, "vote")
        if self.settings.select == "tournament" and ranked:
            try:
                choice = ChosenCandidate(prompt.id, (await self._run_tournament(prompt, ranked)).key, "tournament")
            except EvolutionStopped as reason:
                stopped = str(reason)
        if self.pool.choices.get(prompt.id) != choice:
            self.pool.append(choice)
        return stopped

    async def _run_tournament(self, prompt: Prompt, ranked: Sequence[Candidate]) -> Candidate:
        """Run knock-out rounds in which the best remaining candidate meets the worst. Returns the winner."""
        left, index = select_finalists(ranked, self.settings.finalists), 0
        while len(left) > 1:
            pairs = [(left[rank], left[-1 - rank]) for rank in range(len(left) // 2)]
            unpaired = left[len(pairs) : len(left) - len(pairs)]
            matches = await gather_all([self._play_match(prompt, index + n, *pair) for n, pair in enumerate(pairs)])
            index += len(pairs)
            winners = [self.pool.candidates[match.winner] for match in matches]
            left = sorted([*winners, *unpaired], key=ranked.index)
        return left[0]

    async def _play_match(self, prompt: Prompt, index: int, first: Candidate, second: Candidate) -> Match:
        """Let the referee compare two candidates in both orders, to cancel position bias. In a tie, `first` wins."""
        logged = self.pool.matches.get((prompt.id, index))
        if logged and (logged.first, logged.second) == (first.key, second.key):
            return logged
        orders = await gather_all([self._ask_referee(prompt, first, second), self._ask_referee(prompt, second, first)])
        for_first = [orders[0], None if orders[1] is None else not orders[1]]
        votes = for_first.count(True), for_first.count(False)
        winner = second if votes[1] > votes[0] else first
        failure = "" if any(votes) else "the referee gave no preference"
        match = Match(prompt.id, index, first.key, second.key, winner.key, *votes, failure)
        self.pool.append(match)
        return match

    async def _ask_referee(self, prompt: Prompt, first: Candidate, second: Candidate) -> bool | None:
        """Return whether the referee prefers `first`; None if it gives no preference."""
        view = RoleView(get_problem(prompt), solution=first.summary, other_solution=second.summary)
        key = f"p{prompt.id}.final/referee.{first.key}.{second.key}"
        value = (await self.candidates.caller.ask_role("referee", self.branches[0], key, view)).value
        return None if value is None else bool(value)


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


def select_finalists(ranked: Sequence[Candidate], count: int) -> list[Candidate]:
    """Return the best `count` candidates with distinct answers."""
    distinct: dict[object, Candidate] = {}
    for candidate in ranked:
        distinct.setdefault(candidate.key if candidate.answer is None else ("answer", candidate.answer), candidate)
    return list(distinct.values())[:count]
