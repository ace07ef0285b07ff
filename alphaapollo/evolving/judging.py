"""From a candidate to its judgement: verifiers side by side, each asked again until it reports; the verifier of
verifiers strikes out reports that do not stand; the majority's reports become one."""

from __future__ import annotations

from collections.abc import Sequence

from alphaapollo.environments.informal_math import question_of
from alphaapollo.evolving.cast import Cast, NoResult, Slot
from alphaapollo.evolving.halting import all_settled
from alphaapollo.evolving.pool import Pool
from alphaapollo.evolving.records import Candidate, Judgement, Verdict
from alphaapollo.evolving.roles import View
from alphaapollo.types import Prompt


class Judge:
    """Makes judgements, of so many votes."""

    def __init__(self, cast: Cast, pool: Pool, votes: int):
        self._cast, self._pool, self._votes = cast, pool, votes

    async def judge(self, prompt: Prompt, candidate: Candidate, branch: str) -> Judgement:
        """The judgement of this candidate, made now or found in the pool."""
        if known := self._pool.judgements.get(candidate.key):
            return known
        votes = self._votes if "verifier" in self._cast else 0
        verdicts = await all_settled([self._verify(prompt, candidate, branch, index) for index in range(votes)])
        votes_for, votes_against = count(verdicts)
        report = await self._merge(prompt, candidate, branch, majority_reports(verdicts))
        judgement = Judgement(candidate.key, votes_for, votes_against, report)
        self._pool.append(judgement)
        return judgement

    async def _verify(self, prompt: Prompt, candidate: Candidate, branch: str, index: int) -> Verdict:
        if known := self._pool.verdicts.get(candidate.key, {}).get(index):
            return known
        model = self._cast["verifier"].model_for(branch)
        view = View(question_of(prompt), solution=candidate.summary)
        try:
            performed = await self._cast.perform("verifier", f"{candidate.key}/verifier.{index}", view, branch, prompt)
        except NoResult as error:
            verdict = Verdict(candidate.key, index, model, failure=str(error))
        else:
            report = performed.value
            upheld = await self._check(prompt, candidate, branch, index, report.text)
            verdict = Verdict(candidate.key, index, model, performed.messages, report.vote, report.text, upheld)
        self._pool.append(verdict)
        return verdict

    async def _check(self, prompt: Prompt, candidate: Candidate, branch: str, index: int, report: str) -> bool | None:
        """Does the report stand? None: nobody says; then its vote counts."""
        slot: Slot = "verifier_of_verifiers"
        if slot not in self._cast:
            return None
        view = View(question_of(prompt), solution=candidate.summary, report=report)
        try:
            performed = await self._cast.perform(slot, f"{candidate.key}/{slot}.{index}", view, branch, prompt)
        except NoResult:
            return None
        return bool(performed.value)

    async def _merge(self, prompt: Prompt, candidate: Candidate, branch: str, reports: Sequence[str]) -> str:
        """One after the other where nobody merges."""
        if len(reports) > 1 and "aggregator" in self._cast:
            view = View(question_of(prompt), solution=candidate.summary, reports=tuple(reports))
            try:
                performed = await self._cast.perform("aggregator", f"{candidate.key}/aggregator", view, branch, prompt)
                return str(performed.value)
            except NoResult:
                pass  # its calls are in the pool
        return "\n\n".join(reports)


def count(verdicts: Sequence[Verdict]) -> tuple[int, int]:
    """Votes for and against, of those that count."""
    votes = [verdict.vote for verdict in verdicts if verdict.counts]
    return sum(vote is True for vote in votes), sum(vote is False for vote in votes)


def majority_reports(verdicts: Sequence[Verdict]) -> list[str]:
    """What those say who voted as most did, each once. A tie is against."""
    votes_for, votes_against = count(verdicts)
    own = [one.report for one in verdicts if one.counts and one.vote == (votes_for > votes_against) and one.report]
    return list(dict.fromkeys(own))
