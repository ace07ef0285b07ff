"""Produce a candidate: run the proposer in the environment, ask for a missing answer, summarise, grade."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from alphaapollo.environments.base import Environment, ScoreFn
from alphaapollo.environments.informal_math import get_question
from alphaapollo.evaluation.answer_parsing import extract_answer
from alphaapollo.evolving.model_clients import ModelCallError
from alphaapollo.evolving.pool import Candidate, CandidateId, Grade, Pool
from alphaapollo.evolving.role_calls import RoleCaller, Transcript
from alphaapollo.evolving.roles import PastSolution, RoleView
from alphaapollo.evolving.selection import JudgedCandidate
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


@dataclass(frozen=True)
class Solver:
    """Produces candidates. `make_environment` makes a new environment that scores with `grader`."""

    caller: RoleCaller
    pool: Pool
    grader: Grader
    make_environment: Callable[[], Environment]

    async def solve(
        self, prompt: Prompt, place: CandidateId, branch: str, past: Sequence[JudgedCandidate]
    ) -> Candidate:
        """The candidate at this place, from the pool if it is complete there; a failed one has a `failure`."""
        if logged := self.pool.candidates.get(place.key):
            return logged
        shown: list[JudgedCandidate] = []
        try:
            transcript, shown = await self._run_proposer(prompt, place, branch, past)
            if not transcript.failure and self._lacks_answer(prompt, transcript):
                await self._ask_for_answer(prompt, place, branch, transcript)
        except ModelCallError as error:
            transcript = Transcript(failure=f"proposer: {error}")
        summary = "" if transcript.failure else await self._summarise(prompt, place, branch, transcript.text)
        usage = self.pool.usage[place.key]
        candidate = Candidate(
            key=place.key,
            place=place,
            model=self.caller.model_of("proposer", branch),
            parents=tuple(candidate.key for candidate, _ in shown),
            seed=self.caller.models.call_seed(f"{place.key}/proposer/turn0"),
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
                if not shown or self.caller.models.fits(model, messages):
                    return messages
                shown.pop(0)

        async def reply(chat: list[Message], turn: int) -> str:
            return (await self.caller.call("proposer", branch, f"{place.key}/proposer/turn{turn}", chat)).text

        return await self.caller.run_episode(self.make_environment, prompt, build, reply), shown

    def _lacks_answer(self, prompt: Prompt, transcript: Transcript) -> bool:
        """Always False in an environment that scores by itself."""
        if not self.grader.used_by_environment:
            return False
        if not transcript.done or transcript.score is None:
            return True
        if self.grader.has_truth(prompt):
            return transcript.score.outcome is Outcome.WRONG_FORMAT
        return extract_answer(transcript.last_reply) is None

    async def _ask_for_answer(self, prompt: Prompt, place: CandidateId, branch: str, transcript: Transcript) -> None:
        """Append a request for the answer and the reply to the episode."""
        chat = [*transcript.messages, Message(role="user", content=ASK_FOR_ANSWER)]
        reply = await self.caller.call("proposer", branch, f"{place.key}/proposer/answer", chat)
        transcript.messages = [*chat, Message(role="assistant", content=reply.text)]
        transcript.score = await self.grader.grade(prompt, reply.text)

    async def _summarise(self, prompt: Prompt, place: CandidateId, branch: str, solution: str) -> str:
        """Summary of a solution; the solution itself without a summariser, or if it fails."""
        if "summariser" not in self.caller.roles:
            return solution
        view = RoleView(get_question(prompt), solution=solution)
        result = await self.caller.ask("summariser", branch, f"{place.key}/summariser", view)
        return solution if result.value is None else str(result.value)


def digest_row(prompt: Prompt) -> str:
    """Digest of a data row, to detect that the data of a resumed run has changed."""
    row = msgspec.json.encode([prompt.data_source, prompt.content, prompt.ground_truth])
    return hashlib.blake2b(row, digest_size=8).hexdigest()
