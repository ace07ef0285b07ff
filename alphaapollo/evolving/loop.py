"""The evolution loop: rounds over all problems, then a choice for each problem.

Each round covers all problems before the next one starts, so an exhausted budget leaves all problems at the same
round. Each step first looks for its result in the pool, so a resumed run repeats the loop and makes only missing calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from alphaapollo.config.schema import Evolving
from alphaapollo.environments.informal_math import get_question
from alphaapollo.environments.memory import MemoryType, Step, select_steps
from alphaapollo.evolving.budget import Budget, EvolutionStopped, gather_all
from alphaapollo.evolving.candidates import CandidateMaker
from alphaapollo.evolving.pool import Candidate, CandidateId, Choice, JudgedCandidate, Match, Pool
from alphaapollo.evolving.roles import RoleView
from alphaapollo.types import Message, Prompt


@dataclass(frozen=True)
class EvolutionLoop:
    """One run over its problems.

    Args:
        branches: the model of each branch; the first one is the referee's, unless that role has its own.
        solutions: of one branch, in one round.
        on_round: called with the round number after each round, including one that was cut short.
    """

    settings: Evolving
    branches: Sequence[str]
    solutions: int
    pool: Pool
    budget: Budget
    candidates: CandidateMaker
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
        reasons = await gather_all([self._choose(prompt) for prompt in prompts])
        return stopped or next(filter(None, reasons), "")

    async def _run_round(self, prompt: Prompt, number: int) -> None:
        settings = self.settings
        past = recall(self.pool, prompt.id, number, settings.memory_size, settings.memory_type)
        await gather_all(
            [
                self.candidates.make(prompt, CandidateId(prompt.id, number, branch, index), model, past)
                for branch, model in enumerate(self.branches)
                for index in range(self.solutions)
            ]
        )

    async def _choose(self, prompt: Prompt) -> str:
        """Record the answer of a problem. Returns why a tournament was cut short, or an empty string; then the answer
        is chosen by vote."""
        ranked, stopped = rank_candidates(self.pool, prompt.id), ""
        choice = Choice(prompt.id, ranked[0].key if ranked else None, "vote")
        if self.settings.select == "tournament" and ranked:
            try:
                choice = Choice(prompt.id, (await self._run_tournament(prompt, ranked)).key, "tournament")
            except EvolutionStopped as reason:
                stopped = str(reason)
        if self.pool.choices.get(prompt.id) != choice:
            self.pool.append(choice)
        return stopped

    async def _run_tournament(self, prompt: Prompt, ranked: Sequence[Candidate]) -> Candidate:
        """Knock-out rounds in which the best-ranked candidate meets the last."""
        left, index = select_finalists(ranked, self.settings.finalists), 0
        while len(left) > 1:
            pairs = [(left[place], left[-1 - place]) for place in range(len(left) // 2)]
            bye = left[len(pairs) : len(left) - len(pairs)]
            matches = await gather_all([self._match(prompt, index + n, *pair) for n, pair in enumerate(pairs)])
            index += len(pairs)
            winners = [self.pool.candidates[match.winner] for match in matches]
            left = sorted([*winners, *bye], key=ranked.index)
        return left[0]

    async def _match(self, prompt: Prompt, index: int, first: Candidate, second: Candidate) -> Match:
        """Compare in both orders, so that position gives no advantage. A draw goes to `first`, the higher-ranked."""
        logged = self.pool.matches.get((prompt.id, index))
        if logged and (logged.first, logged.second) == (first.key, second.key):
            return logged
        orders = await gather_all([self._prefers(prompt, first, second), self._prefers(prompt, second, first)])
        for_first = [orders[0], None if orders[1] is None else not orders[1]]
        votes = for_first.count(True), for_first.count(False)
        winner = second if votes[1] > votes[0] else first
        failure = "" if any(votes) else "the referee gave no preference"
        match = Match(prompt.id, index, first.key, second.key, winner.key, *votes, failure)
        self.pool.append(match)
        return match

    async def _prefers(self, prompt: Prompt, first: Candidate, second: Candidate) -> bool | None:
        """Whether the referee prefers `first`; None without a preference."""
        view = RoleView(get_question(prompt), solution=first.summary, other=second.summary)
        key = f"p{prompt.id}.final/referee.{first.key}.{second.key}"
        value = (await self.candidates.caller.ask("referee", self.branches[0], key, view)).value
        return None if value is None else bool(value)


def recall(pool: Pool, problem: int, before_round: int, size: int, memory_type: MemoryType) -> list[JudgedCandidate]:
    """Memory of a proposer: at most `size` candidates of earlier rounds, oldest first, scored by share of votes."""
    if size == 0:
        return []
    judged = pool.judged_candidates(problem, before_round)
    steps = [
        Step(candidate.summary, [Message(role="user", content=judgement.report)], judgement.share)
        for candidate, judgement in judged
    ]
    chosen = {id(step) for step in select_steps(steps, size, memory_type)}
    return [one for step, one in zip(steps, judged, strict=True) if id(step) in chosen]


def rank_candidates(pool: Pool, problem: int, before_round: int | None = None) -> list[Candidate]:
    """Judged candidates, best first: larger share of votes, then shorter summary, then earlier."""
    judged = pool.judged_candidates(problem, before_round)
    order = sorted(judged, key=lambda one: (-one[1].share, len(one[0].summary)))
    return [candidate for candidate, _ in order]


def select_finalists(ranked: Sequence[Candidate], count: int) -> list[Candidate]:
    """The first `count` candidates, of equal answers only the best one."""
    distinct: dict[object, Candidate] = {}
    for candidate in ranked:
        distinct.setdefault(candidate.key if candidate.answer is None else ("answer", candidate.answer), candidate)
    return list(distinct.values())[:count]
