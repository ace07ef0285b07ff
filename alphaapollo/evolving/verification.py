"""Judge a candidate: verifiers vote in parallel, bad reports are struck out, the majority's reports are merged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from alphaapollo.environments.informal_math import get_question
from alphaapollo.evolving.budget import gather_all
from alphaapollo.evolving.pool import Candidate, Judgement, Pool, VerifierVerdict
from alphaapollo.evolving.role_calls import RoleCaller
from alphaapollo.evolving.roles import RoleView
from alphaapollo.types import Prompt


@dataclass(frozen=True)
class VerifierPanel:
    """Judges candidates by `votes` verifiers each."""

    caller: RoleCaller
    pool: Pool
    votes: int

    async def judge(self, prompt: Prompt, candidate: Candidate, branch: str) -> Judgement:
        """The judgement of a candidate, from the pool if it is complete there."""
        if logged := self.pool.judgements.get(candidate.key):
            return logged
        votes = self.votes if "verifier" in self.caller.roles else 0
        view = RoleView(get_question(prompt), solution=candidate.summary)
        verdicts = await gather_all([self._verify(view, candidate.key, branch, index) for index in range(votes)])
        votes_for, votes_against = count_votes(verdicts)
        report = await self._merge(view, candidate.key, branch, get_majority_reports(verdicts))
        judgement = Judgement(candidate.key, votes_for, votes_against, report)
        self.pool.append(judgement)
        return judgement

    async def _verify(self, view: RoleView, candidate: str, branch: str, index: int) -> VerifierVerdict:
        if logged := self.pool.verdicts.get(candidate, {}).get(index):
            return logged
        model = self.caller.model_of("verifier", branch)
        result = await self.caller.ask("verifier", branch, f"{candidate}/verifier.{index}", view)
        if result.value is None:
            verdict = VerifierVerdict(candidate, index, model, failure=result.failure)
        else:
            vote, report = result.value.vote, result.value.text
            upheld = await self._check_report(view, candidate, branch, index, report)
            verdict = VerifierVerdict(candidate, index, model, result.messages, vote, report, upheld)
        self.pool.append(verdict)
        return verdict

    async def _check_report(self, view: RoleView, candidate: str, branch: str, index: int, report: str) -> bool | None:
        """Whether the verifier of verifiers upholds a report; None without a decision, then the vote counts."""
        slot = "verifier_of_verifiers"
        if slot not in self.caller.roles:
            return None
        view = RoleView(view.question, solution=view.solution, report=report)
        result = await self.caller.ask(slot, branch, f"{candidate}/{slot}.{index}", view)
        return None if result.value is None else bool(result.value)

    async def _merge(self, view: RoleView, candidate: str, branch: str, reports: Sequence[str]) -> str:
        """One report; the reports are concatenated without an aggregator, or if it fails."""
        if len(reports) > 1 and "aggregator" in self.caller.roles:
            view = RoleView(view.question, solution=view.solution, reports=tuple(reports))
            result = await self.caller.ask("aggregator", branch, f"{candidate}/aggregator", view)
            if result.value is not None:
                return str(result.value)
        return "\n\n".join(reports)


def count_votes(verdicts: Sequence[VerifierVerdict]) -> tuple[int, int]:
    """Votes for and against."""
    votes = [verdict.vote for verdict in verdicts if verdict.counts]
    return votes.count(True), votes.count(False)


def get_majority_reports(verdicts: Sequence[VerifierVerdict]) -> list[str]:
    """Distinct reports of the majority. A tie counts as against."""
    votes_for, votes_against = count_votes(verdicts)
    won = votes_for > votes_against
    own = [verdict.report for verdict in verdicts if verdict.counts and verdict.vote == won and verdict.report]
    return list(dict.fromkeys(own))
