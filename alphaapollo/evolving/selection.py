"""Which candidate of a problem is its answer: by votes and brevity, or by a tournament of the best before a referee."""

from __future__ import annotations

from collections.abc import Sequence

from alphaapollo.environments.informal_math import question_of
from alphaapollo.evolving.cast import Cast, NoResult
from alphaapollo.evolving.halting import all_settled
from alphaapollo.evolving.memory import Remembered, judged_candidates
from alphaapollo.evolving.pool import Pool
from alphaapollo.evolving.records import Candidate, Choice, Match
from alphaapollo.evolving.roles import View
from alphaapollo.types import Prompt


def ranked(judged: Sequence[Remembered]) -> list[Candidate]:
    """Best first: the larger share of the votes, then the shorter summary, then the earlier."""
    order = sorted(judged, key=lambda one: (-one[1].share, len(one[0].summary)))  # a stable sort
    return [candidate for candidate, _ in order]


def chosen_by_vote(pool: Pool, problem: int, before_round: int | None = None) -> Candidate | None:
    """The best so far; None: there is none."""
    return next(iter(ranked(judged_candidates(pool, problem, before_round))), None)


def finalists(candidates: Sequence[Candidate], count: int) -> list[Candidate]:
    """The first so many, of equal answers only the best one: between those there is nothing to choose."""
    seen: set[str] = set()
    found = []
    for candidate in candidates:
        if candidate.answer is None or candidate.answer not in seen:
            found.append(candidate)
        seen |= {candidate.answer} if candidate.answer is not None else set()
    return found[:count]


class Selector:
    """Makes choices. tournament: of how many; None: by vote."""

    def __init__(self, cast: Cast, pool: Pool, branch: str, tournament: int | None):
        self._cast, self._pool, self._branch, self._tournament = cast, pool, branch, tournament

    async def choose(self, prompt: Prompt) -> Choice:
        """By a tournament where one is asked for. Halt, ModelDown: it could not be ended."""
        best = ranked(judged_candidates(self._pool, prompt.id))
        if self._tournament is None or not best:
            return self.by_vote(prompt.id)
        left, index = finalists(best, self._tournament), 0
        while len(left) > 1:
            pairs = [(left[place], left[-1 - place]) for place in range(len(left) // 2)]  # the best meets the last
            bye = left[len(pairs) : len(left) - len(pairs)]
            matches = await all_settled(
                [self._match(prompt, index + number, *pair) for number, pair in enumerate(pairs)]
            )
            index += len(pairs)
            winners = [self._pool.candidates[match.winner] for match in matches]
            left = sorted([*winners, *bye], key=best.index)
        return self._note(Choice(prompt.id, left[0].key, "tournament"))

    def by_vote(self, problem: int) -> Choice:
        """Without a call."""
        best = chosen_by_vote(self._pool, problem)
        return self._note(Choice(problem, best.key if best else None, "vote"))

    def _note(self, choice: Choice) -> Choice:
        if self._pool.choices.get(choice.problem) != choice:
            self._pool.append(choice)
        return choice

    async def _match(self, prompt: Prompt, index: int, first: Candidate, second: Candidate) -> Match:
        """In both orders, so that what stands first is no advantage. A draw goes to `first`, who has more votes."""
        known = self._pool.matches.get((prompt.id, index))
        if known and (known.first, known.second) == (first.key, second.key):
            return known
        orders = await all_settled([self._prefers(prompt, first, second), self._prefers(prompt, second, first)])
        for_first = [orders[0], None if orders[1] is None else not orders[1]]
        votes = for_first.count(True), for_first.count(False)
        winner = second if votes[1] > votes[0] else first
        failure = "" if any(votes) else "the referee prefers neither"
        match = Match(prompt.id, index, first.key, second.key, winner.key, *votes, failure)
        self._pool.append(match)
        return match

    async def _prefers(self, prompt: Prompt, one: Candidate, other: Candidate) -> bool | None:
        """Is `one`, which stands first, the better? None: the referee does not say."""
        view = View(question_of(prompt), solution=one.summary, other=other.summary)
        unit = f"p{prompt.id}.final/referee.{one.key}.{other.key}"
        try:
            return bool((await self._cast.perform("referee", unit, view, self._branch, prompt)).value)
        except NoResult:
            return None
