"""Rank candidates: which past solutions a proposer is shown, and which candidate becomes a problem's answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from alphaapollo.environments.informal_math import get_question
from alphaapollo.environments.memory import MemoryType, Step, select_steps
from alphaapollo.evolving.budget import EvolutionStopped, gather_all
from alphaapollo.evolving.pool import Candidate, Choice, Judgement, Match, Pool
from alphaapollo.evolving.role_calls import RoleCaller
from alphaapollo.evolving.roles import RoleView
from alphaapollo.types import Message, Prompt

JudgedCandidate = tuple[Candidate, Judgement]


def get_judged_candidates(pool: Pool, problem: int, before_round: int | None = None) -> list[JudgedCandidate]:
    """Judged candidates of a problem, ordered by round, branch and index."""
    own = pool.candidates_of_problem(problem, before_round)
    return [(one, pool.judgements[one.key]) for one in own if one.key in pool.judgements]


def recall(pool: Pool, problem: int, before_round: int, size: int, memory_type: MemoryType) -> list[JudgedCandidate]:
    """Memory of a proposer: at most `size` candidates of earlier rounds, oldest first, scored by share of votes."""
    if size == 0:
        return []
    judged = get_judged_candidates(pool, problem, before_round)
    steps = [
        Step(candidate.summary, [Message(role="user", content=judgement.report)], judgement.share)
        for candidate, judgement in judged
    ]
    chosen = {id(step) for step in select_steps(steps, size, memory_type)}
    return [one for step, one in zip(steps, judged, strict=True) if id(step) in chosen]


def rank_candidates(judged: Sequence[JudgedCandidate]) -> list[Candidate]:
    """Best first: larger share of votes, then shorter summary, then earlier."""
    order = sorted(judged, key=lambda one: (-one[1].share, len(one[0].summary)))
    return [candidate for candidate, _ in order]


def find_best_candidate(pool: Pool, problem: int, before_round: int | None = None) -> Candidate | None:
    """The highest-ranked candidate; None if there is none."""
    return next(iter(rank_candidates(get_judged_candidates(pool, problem, before_round))), None)


def select_finalists(ranked: Sequence[Candidate], count: int) -> list[Candidate]:
    """The first `count` candidates, of equal answers only the best one."""
    distinct: dict[object, Candidate] = {}
    for candidate in ranked:
        distinct.setdefault(candidate.key if candidate.answer is None else ("answer", candidate.answer), candidate)
    return list(distinct.values())[:count]


@dataclass(frozen=True)
class AnswerSelector:
    """Chooses the answer of each problem.

    Args:
        branch: the model of the referee, unless the role has its own.
        tournament: number of finalists; None: choose by vote.
    """

    caller: RoleCaller
    pool: Pool
    branch: str
    tournament: int | None

    async def choose(self, prompt: Prompt) -> str:
        """Record the answer of a problem. Returns why a tournament was cut short, or an empty string; then the answer
        is chosen by vote."""
        best, stopped = rank_candidates(get_judged_candidates(self.pool, prompt.id)), ""
        choice = Choice(prompt.id, best[0].key if best else None, "vote")
        if self.tournament is not None and best:
            try:
                choice = Choice(prompt.id, (await self._run_tournament(prompt, best)).key, "tournament")
            except EvolutionStopped as reason:
                stopped = str(reason)
        if self.pool.choices.get(prompt.id) != choice:
            self.pool.append(choice)
        return stopped

    async def _run_tournament(self, prompt: Prompt, ranked: Sequence[Candidate]) -> Candidate:
        """Knock-out rounds in which the best-ranked candidate meets the last."""
        left, index = select_finalists(ranked, self.tournament or 0), 0
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
        result = await self.caller.ask("referee", self.branch, key, view)
        return None if result.value is None else bool(result.value)
