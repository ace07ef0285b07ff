"""What a problem's proposers remember: its judged candidates of the rounds before, by environments/memory.py. All
branches share it."""

from __future__ import annotations

from alphaapollo.environments.memory import MemoryType, Step, select
from alphaapollo.evolving.pool import Pool
from alphaapollo.evolving.records import Candidate, Judgement
from alphaapollo.types import Message

Remembered = tuple[Candidate, Judgement]


def recall(pool: Pool, problem: int, before_round: int, size: int, kind: MemoryType) -> list[Remembered]:
    """At most `size` of them, oldest first; the score is the share of votes."""
    if size == 0:
        return []
    judged = judged_candidates(pool, problem, before_round)
    steps = [
        Step(candidate.summary, [Message(role="user", content=judgement.report)], judgement.share)
        for candidate, judgement in judged
    ]
    chosen = {id(step) for step in select(steps, size, kind)}
    return [one for step, one in zip(steps, judged, strict=True) if id(step) in chosen]


def judged_candidates(pool: Pool, problem: int, before_round: int | None = None) -> list[Remembered]:
    """Those that are judged, by round, branch and index."""
    own = pool.of_problem(problem, before_round)
    return [(one, pool.judgements[one.key]) for one in own if one.key in pool.judgements]
