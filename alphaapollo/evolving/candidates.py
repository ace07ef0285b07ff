"""Make one candidate solution and judge it: propose, ask for a missing answer, summarise, grade, verify.

Each verifier votes and writes a report. The majority's reports are merged.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from alphaapollo.environments.base import Environment, ScoreFn
from alphaapollo.environments.informal_math import get_problem
from alphaapollo.evaluation.estimates import extract_answer
from alphaapollo.evolving.agents import AgentProposer
from alphaapollo.evolving.budget import gather_all
from alphaapollo.evolving.model_clients import ModelCallError
from alphaapollo.evolving.pool import Candidate, CandidateId, Grade, JudgedCandidate, Judgement, Pool, VerifierVerdict
from alphaapollo.evolving.role_calls import RoleModelCaller, Transcript
from alphaapollo.evolving.roles import PastSolution, RoleView
from alphaapollo.rewards.base import make_failed_score
from alphaapollo.types import Message, Outcome, Prompt, Score

ASK_FOR_ANSWER = "You have not given an answer that could be read. Give your final answer now, and nothing else."


@dataclass(frozen=True)
class Grader:
    """Grader of solutions by the reward function. A problem without a ground truth gets a failed score."""

    score: ScoreFn
    has_ground_truth: Callable[[Prompt], bool]
    used_by_environment: bool  # True: the environment scores with this grader

    async def grade(self, prompt: Prompt, text: str) -> Score:
        """Return the score of a solution; a failed score if the problem has no ground truth."""
        if self.has_ground_truth(prompt):
            return await self.score(prompt, text)
        return make_failed_score("the problem has no ground truth")

    def grade_transcript(self, prompt: Prompt, transcript: Transcript) -> Grade | None:
        """Return the grade of a finished episode; None without a ground truth or if the episode failed."""
        if transcript.failure or (self.used_by_environment and not self.has_ground_truth(prompt)):
            return None
        return Grade.from_score(transcript.score or Score(0.0, reason="the episode ended without a score"))

    def lacks_answer(self, prompt: Prompt, transcript: Transcript) -> bool:
        """Whether an episode ended without a readable answer; False if the environment computes its own score."""
        if not self.used_by_environment:
            return False
        if not transcript.ended_by_environment or transcript.score is None:
            return True
        if self.has_ground_truth(prompt):
            return transcript.score.outcome is Outcome.WRONG_FORMAT
        return extract_answer(transcript.last_message) is None


@dataclass(frozen=True)
class CandidateMaker:
    """Maker of candidate solutions, each judged by several verifiers. Steps that are logged in the pool are skipped.

    `make_environment` creates an environment that scores with `grader`. `agents`: proposers by model name, with
    env.env_name=agent.
    """

    caller: RoleModelCaller
    pool: Pool
    grader: Grader
    make_environment: Callable[[], Environment]
    num_verifiers: int
    agents: Mapping[str, AgentProposer] = field(default_factory=dict)

    async def propose_and_judge(
        self, prompt: Prompt, candidate_id: CandidateId, branch_model: str, past_candidates: Sequence[JudgedCandidate]
    ) -> None:
        """Make the candidate with this id and, if it has not failed, judge it. branch_model: name of the proposing
        model. past_candidates: candidates of earlier rounds for the proposer's prompt."""
        candidate = self.pool.candidates.get(candidate_id.key)
        candidate = candidate or await self._propose_candidate(prompt, candidate_id, branch_model, past_candidates)
        if not candidate.failure and candidate.key not in self.pool.judgements:
            view = RoleView(get_problem(prompt), solution=candidate.summary)
            await self._judge_candidate(view, candidate.key, branch_model)

    async def _propose_candidate(
        self, prompt: Prompt, candidate_id: CandidateId, branch_model: str, past_candidates: Sequence[JudgedCandidate]
    ) -> Candidate:
        shown: list[JudgedCandidate] = []
        try:
            transcript, shown = await self._run_proposer(prompt, candidate_id, branch_model, past_candidates)
            if not (self.agents or transcript.failure) and self.grader.lacks_answer(prompt, transcript):
                chat = [*transcript.messages, Message(role="user", content=ASK_FOR_ANSWER)]
                key = f"{candidate_id.key}/proposer/answer"
                reply = await self.caller.call_model("proposer", branch_model, key, chat)
                transcript.messages = [*chat, Message(role="assistant", content=reply.text)]
                transcript.score = await self.grader.grade(prompt, reply.text)
        except ModelCallError as error:
            transcript = Transcript(failure=f"proposer: {error}")
        summary = ""
        if not transcript.failure:
            view = RoleView(get_problem(prompt), solution=transcript.text)
            result = await self.caller.ask_role("summariser", branch_model, f"{candidate_id.key}/summariser", view)
            summary = transcript.text if result.value is None else str(result.value)
        usage = self.pool.usage[candidate_id.key]
        candidate = Candidate(
            key=candidate_id.key,
            id=candidate_id,
            model=self.caller.get_model_name("proposer", branch_model),
            parents=tuple(candidate.key for candidate, _ in shown),
            seed=self.caller.derive_call_seed(f"{candidate_id.key}/proposer/turn0"),
            messages=tuple(transcript.messages),
            num_prompt_messages=transcript.num_prompt_messages,
            solution=transcript.text,
            summary=summary,
            answer=extract_answer(transcript.last_message) if transcript.last_message else None,
            grade=self.grader.grade_transcript(prompt, transcript),
            tokens=usage.tokens,
            money=usage.money,
            failure=transcript.failure,
            row=compute_prompt_digest(prompt),
        )
        return self.pool.append(candidate)

    async def _run_proposer(
        self, prompt: Prompt, candidate_id: CandidateId, branch_model: str, past_candidates: Sequence[JudgedCandidate]
    ) -> tuple[Transcript, list[JudgedCandidate]]:
        """Run the proposer's episode. Returns the transcript, and the past candidates that fit into the prompt."""
        model, shown = self.caller.get_model_name("proposer", branch_model), list(past_candidates)

        def build_prompt(first_messages: list[Message]) -> list[Message]:
            while True:
                solutions = tuple(
                    PastSolution(one.summary, votes.votes_for, votes.votes_against, votes.report)
                    for one, votes in shown
                )
                messages = self.caller.roles["proposer"].build(
                    RoleView(get_problem(prompt), tuple(first_messages), past=solutions)
                )
                if not shown or self.caller.clients[model].fits_prompt_limit(messages):
                    return messages
                shown.pop(0)

        if self.agents:
            return await self.agents[model].propose(prompt, candidate_id, build_prompt), shown
        key = f"{candidate_id.key}/proposer/"
        run = self.caller.run_episode("proposer", branch_model, key, self.make_environment, prompt, build_prompt)
        return await run, shown

    async def _judge_candidate(self, view: RoleView, candidate_key: str, branch_model: str) -> None:
        verifiers = range(self.num_verifiers)
        verdicts = await gather_all([self._ask_verifier(view, candidate_key, branch_model, one) for one in verifiers])
        votes_for, votes_against = count_votes_for_and_against(verdicts)
        reports = get_majority_reports(verdicts)
        report = "\n\n".join(reports)
        if len(reports) > 1:
            view = RoleView(view.question, solution=view.solution, reports=tuple(reports))
            result = await self.caller.ask_role("aggregator", branch_model, f"{candidate_key}/aggregator", view)
            report = report if result.value is None else str(result.value)
        self.pool.append(Judgement(candidate_key, votes_for, votes_against, report))

    async def _ask_verifier(
        self, view: RoleView, candidate_key: str, branch_model: str, verifier_id: int
    ) -> VerifierVerdict:
        if logged := self.pool.verdicts.get(candidate_key, {}).get(verifier_id):
            return logged
        model = self.caller.get_model_name("verifier", branch_model)
        result = await self.caller.ask_role("verifier", branch_model, f"{candidate_key}/verifier.{verifier_id}", view)
        if result.value is None:
            verdict = VerifierVerdict(candidate_key, verifier_id, model, failure=result.failure)
        else:
            vote, report = result.value.vote, result.value.text
            verdict = VerifierVerdict(candidate_key, verifier_id, model, result.messages, vote, report)
        return self.pool.append(verdict)


def count_votes_for_and_against(verdicts: Sequence[VerifierVerdict]) -> tuple[int, int]:
    votes = [verdict.vote for verdict in verdicts]
    return votes.count(True), votes.count(False)


def get_majority_reports(verdicts: Sequence[VerifierVerdict]) -> list[str]:
    """Return the distinct reports of the verifiers that voted with the majority. A tie counts as a majority against."""
    votes_for, votes_against = count_votes_for_and_against(verdicts)
    majority = votes_for > votes_against
    reports = [verdict.report for verdict in verdicts if verdict.vote is majority and verdict.report]
    return list(dict.fromkeys(reports))


def compute_prompt_digest(prompt: Prompt) -> str:
    """Return a digest of a problem's data row, to detect changed data when a run resumes."""
    row = msgspec.json.encode([prompt.data_source, prompt.content, prompt.ground_truth_text])
    return hashlib.blake2b(row, digest_size=8).hexdigest()
