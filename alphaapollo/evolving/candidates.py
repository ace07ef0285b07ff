"""Make and judge one candidate: propose in the environment, ask for a missing answer, summarise, grade, verify.

Several verifiers vote in parallel. Reports that are not upheld do not count, and the majority's reports are merged.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from alphaapollo.environments.base import Environment, ScoreFn
from alphaapollo.environments.informal_math import get_question
from alphaapollo.evaluation.answer_parsing import extract_answer
from alphaapollo.evolving.budget import gather_all
from alphaapollo.evolving.model_clients import ModelCallError
from alphaapollo.evolving.pool import Candidate, CandidateId, Grade, JudgedCandidate, Judgement, Pool, VerifierVerdict
from alphaapollo.evolving.role_calls import RoleCaller, Transcript
from alphaapollo.evolving.roles import PastSolution, RoleView
from alphaapollo.types import Message, Outcome, Prompt, Score

ASK_FOR_ANSWER = "You have not given an answer that could be read. Give your final answer now, and nothing else."


@dataclass(frozen=True)
class Grader:
    """The reward function, limited to problems with a ground truth."""

    score: ScoreFn
    has_truth: Callable[[Prompt], bool]
    used_by_environment: bool  # the environment scores with this grader, rather than by itself

    async def grade(self, prompt: Prompt, text: str) -> Score:
        """Score of a text; a failure if the problem has no ground truth."""
        if self.has_truth(prompt):
            return await self.score(prompt, text)
        return Score(math.nan, outcome=Outcome.GRADER_FAILED, reason="there is no ground truth")

    def grade_transcript(self, prompt: Prompt, transcript: Transcript) -> Grade | None:
        """Grade of an episode; None without a ground truth or after a failure."""
        if transcript.failure or (self.used_by_environment and not self.has_truth(prompt)):
            return None
        return Grade.of(transcript.score or Score(0.0, reason="the episode ended without a score"))

    def lacks_answer(self, prompt: Prompt, transcript: Transcript) -> bool:
        """Always False in an environment that scores by itself."""
        if not self.used_by_environment:
            return False
        if not transcript.done or transcript.score is None:
            return True
        if self.has_truth(prompt):
            return transcript.score.outcome is Outcome.WRONG_FORMAT
        return extract_answer(transcript.last_reply) is None


@dataclass(frozen=True)
class CandidateMaker:
    """Makes candidates and judges them by `votes` verifiers each. What is complete in the pool is not repeated.

    `make_environment` makes a new environment that scores with `grader`.
    """

    caller: RoleCaller
    pool: Pool
    grader: Grader
    make_environment: Callable[[], Environment]
    votes: int

    async def make(self, prompt: Prompt, place: CandidateId, branch: str, past: Sequence[JudgedCandidate]) -> None:
        """Make the candidate at this place and, if it has not failed, its judgement. branch: its model."""
        candidate = self.pool.candidates.get(place.key) or await self._propose(prompt, place, branch, past)
        if not candidate.failure and candidate.key not in self.pool.judgements:
            await self._judge(RoleView(get_question(prompt), solution=candidate.summary), candidate.key, branch)

    async def _propose(
        self, prompt: Prompt, place: CandidateId, branch: str, past: Sequence[JudgedCandidate]
    ) -> Candidate:
        shown: list[JudgedCandidate] = []
        try:
            transcript, shown = await self._run_proposer(prompt, place, branch, past)
            if not transcript.failure and self.grader.lacks_answer(prompt, transcript):
                chat = [*transcript.messages, Message(role="user", content=ASK_FOR_ANSWER)]
                reply = await self.caller.call("proposer", branch, f"{place.key}/proposer/answer", chat)
                transcript.messages = [*chat, Message(role="assistant", content=reply.text)]
                transcript.score = await self.grader.grade(prompt, reply.text)
        except ModelCallError as error:
            transcript = Transcript(failure=f"proposer: {error}")
        summary = ""
        if not transcript.failure:
            view = RoleView(get_question(prompt), solution=transcript.text)
            result = await self.caller.ask("summariser", branch, f"{place.key}/summariser", view)
            summary = transcript.text if result.value is None else str(result.value)
        usage = self.pool.usage[place.key]
        candidate = Candidate(
            key=place.key,
            place=place,
            model=self.caller.model_of("proposer", branch),
            parents=tuple(candidate.key for candidate, _ in shown),
            seed=self.caller.call_seed(f"{place.key}/proposer/turn0"),
            messages=tuple(transcript.messages),
            num_prompt_messages=transcript.num_prompt_messages,
            solution=transcript.text,
            summary=summary,
            answer=extract_answer(transcript.last_reply) if transcript.last_reply else None,
            grade=self.grader.grade_transcript(prompt, transcript),
            tokens=usage.tokens,
            money=usage.money,
            failure=transcript.failure,
            row=digest_row(prompt),
        )
        self.pool.append(candidate)
        return candidate

    async def _run_proposer(
        self, prompt: Prompt, place: CandidateId, branch: str, past: Sequence[JudgedCandidate]
    ) -> tuple[Transcript, list[JudgedCandidate]]:
        """The episode, and the past solutions shown in it: the newest ones that fit into the prompt limit."""
        model, shown = self.caller.model_of("proposer", branch), list(past)

        def build(first: list[Message]) -> list[Message]:
            while True:
                solutions = tuple(
                    PastSolution(one.summary, votes.votes_for, votes.votes_against, votes.report)
                    for one, votes in shown
                )
                messages = self.caller.roles["proposer"].build(
                    RoleView(get_question(prompt), tuple(first), past=solutions)
                )
                if not shown or self.caller.fits(model, messages):
                    return messages
                shown.pop(0)

        key = f"{place.key}/proposer/"
        return await self.caller.run_episode("proposer", branch, key, self.make_environment, prompt, build), shown

    async def _judge(self, view: RoleView, candidate: str, branch: str) -> None:
        verdicts = await gather_all([self._verify(view, candidate, branch, index) for index in range(self.votes)])
        votes_for, votes_against = count_votes(verdicts)
        reports = get_majority_reports(verdicts)
        report = "\n\n".join(reports)
        if len(reports) > 1:
            view = RoleView(view.question, solution=view.solution, reports=tuple(reports))
            result = await self.caller.ask("aggregator", branch, f"{candidate}/aggregator", view)
            report = report if result.value is None else str(result.value)
        self.pool.append(Judgement(candidate, votes_for, votes_against, report))

    async def _verify(self, view: RoleView, candidate: str, branch: str, index: int) -> VerifierVerdict:
        if logged := self.pool.verdicts.get(candidate, {}).get(index):
            return logged
        model = self.caller.model_of("verifier", branch)
        result = await self.caller.ask("verifier", branch, f"{candidate}/verifier.{index}", view)
        if result.value is None:
            verdict = VerifierVerdict(candidate, index, model, failure=result.failure)
        else:
            vote, report = result.value.vote, result.value.text
            slot, view = "verifier_of_verifiers", RoleView(view.question, solution=view.solution, report=report)
            upheld = (await self.caller.ask(slot, branch, f"{candidate}/{slot}.{index}", view)).value
            verdict = VerifierVerdict(
                candidate, index, model, result.messages, vote, report, None if upheld is None else bool(upheld)
            )
        self.pool.append(verdict)
        return verdict


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


def digest_row(prompt: Prompt) -> str:
    """Digest of a data row, to detect that the data of a resumed run has changed."""
    row = msgspec.json.encode([prompt.data_source, prompt.content, prompt.ground_truth])
    return hashlib.blake2b(row, digest_size=8).hexdigest()
