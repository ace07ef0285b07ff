"""Rank candidates: which past solutions a proposer is shown, and which candidates may become a problem's answer."""

from __future__ import annotations

from collections.abc import Sequence

from alphaapollo.environments.memory import MemoryType, Step, select_steps
from alphaapollo.evolving.pool import Candidate, Judgement, Pool
from alphaapollo.types import Message

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


def rank_candidates(pool: Pool, problem: int, before_round: int | None = None) -> list[Candidate]:
    """Judged candidates, best first: larger share of votes, then shorter summary, then earlier."""
    judged = get_judged_candidates(pool, problem, before_round)
    order = sorted(judged, key=lambda one: (-one[1].share, len(one[0].summary)))
    return [candidate for candidate, _ in order]


def select_finalists(ranked: Sequence[Candidate], count: int) -> list[Candidate]:
    """The first `count` candidates, of equal answers only the best one."""
    distinct: dict[object, Candidate] = {}
    for candidate in ranked:
        distinct.setdefault(candidate.key if candidate.answer is None else ("answer", candidate.answer), candidate)
    return list(distinct.values())[:count]
