"""Evolution of one run: several rounds of solving all problems.

propose -> ask for a missing answer -> summarise -> grade -> verify (votes and reports; the majority's are merged)

A round covers all problems before the next round starts, so all problems are in the same round when the budget ends.
Each step first looks for its result in the pool, so a resumed run repeats the steps and makes only the missing calls.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from alphaapollo.config.schema import EvolvingConfig
from alphaapollo.environments.base import Environment, ScoreFn
from alphaapollo.environments.informal_math import get_problem
from alphaapollo.environments.memory import MemoryType, Step, select_steps
from alphaapollo.evaluation.estimates import extract_answer
from alphaapollo.evolving.budget import EvolutionStopped
from alphaapollo.evolving.model_clients import ModelCallError
from alphaapollo.evolving.pool import Candidate, Grade, JudgedCandidate, Judgement, Pool, Position, Verdict
from alphaapollo.evolving.role_caller import RoleCaller, Transcript
from alphaapollo.evolving.roles import PastSolution, RoleView
from alphaapollo.types import Message, Outcome, Prompt, Score

ASK_FOR_ANSWER = "You have not given an answer that could be read. Give your final answer now, and nothing else."
T = TypeVar("T")


@dataclass(frozen=True)
class Evolution:
    """Evolution of one run.

    Args:
        grade: the reward function; returns a failed score if a problem has no ground truth.
        uses_reward: whether the environment scores with `grade`.
        on_round: function called with the round number after each round, also after an incomplete round.
        on_solution: function called after each solution, also if the pool already had it.
    """

    config: EvolvingConfig
    pool: Pool
    caller: RoleCaller
    make_environment: Callable[[], Environment]
    grade: ScoreFn
    has_ground_truth: Callable[[Prompt], bool]
    uses_reward: bool
    on_round: Callable[[int], None]
    on_solution: Callable[[], None]

    async def run(self, prompts: Sequence[Prompt]) -> str:
        """Run all rounds. Returns why they ended early, or an empty string."""
        for number in range(self.config.evolving.rounds):
            try:
                await gather_all([self._run_problem_round(prompt, number) for prompt in prompts])
            except EvolutionStopped as reason:
                self.on_round(number)
                return str(reason)
            self.on_round(number)
        return ""

    async def _run_problem_round(self, prompt: Prompt, number: int) -> None:
        settings = self.config.evolving
        past = select_past_solutions(self.pool, prompt.id, number, settings.memory_size, settings.memory_type)
        positions = [
            (Position(prompt.id, number, branch, index), model)
            for branch, model in enumerate(self.config.branches)
            for index in range(self.config.data.n_samples)
        ]
        await gather_all([self._solve(prompt, position, model, past) for position, model in positions])

    async def _solve(
        self, prompt: Prompt, position: Position, branch_model: str, past: Sequence[JudgedCandidate]
    ) -> None:
        """Make the candidate and, if it has not failed, judge it. past: candidates for the proposer's prompt."""
        candidate = self.pool.candidates.get(position.key)
        candidate = candidate or self.pool.append(await self._make_candidate(prompt, position, branch_model, past))
        if not candidate.failure and candidate.key not in self.pool.judgements:
            view = RoleView(get_problem(prompt), solution=candidate.summary)
            self.pool.append(await self._judge(view, candidate.key, branch_model))
        self.on_solution()

    async def _make_candidate(
        self, prompt: Prompt, position: Position, branch_model: str, past: Sequence[JudgedCandidate]
    ) -> Candidate:
        key, shown, summary = position.key, list(past), ""
        try:
            transcript = await self._propose(prompt, position, branch_model, shown)
            if not transcript.failure and self._lacks_answer(prompt, transcript):
                chat = [*transcript.messages, Message(role="user", content=ASK_FOR_ANSWER)]
                reply = await self.caller.call_model("proposer", branch_model, f"{key}/proposer/answer", chat)
                transcript.messages = [*chat, Message(role="assistant", content=reply.text)]
                transcript.score = await self.grade(prompt, reply.text)
        except ModelCallError as error:
            transcript = Transcript(failure=f"proposer: {error}")
        if not transcript.failure:
            view = RoleView(get_problem(prompt), solution=transcript.text)
            text, _ = await self.caller.ask_role("summariser", branch_model, f"{key}/summariser", view)
            summary = transcript.text if text is None else str(text)
        return Candidate(
            key=key,
            position=position,
            model=self.caller.get_model_name("proposer", branch_model),
            parents=tuple(candidate.key for candidate, _ in shown),
            messages=tuple(transcript.messages),
            num_prompt_messages=transcript.num_prompt_messages,
            solution=transcript.text,
            summary=summary,
            answer=extract_answer(transcript.last_message) if transcript.last_message else None,
            grade=self._make_grade(prompt, transcript),
            tokens=self.pool.usage[key].tokens,
            failure=transcript.failure,
            row=compute_prompt_digest(prompt),
        )

    async def _propose(
        self, prompt: Prompt, position: Position, branch_model: str, shown: list[JudgedCandidate]
    ) -> Transcript:
        """Run the proposer's episode. Removes past candidates from `shown` that do not fit into the prompt."""
        model, key = self.caller.get_model_name("proposer", branch_model), f"{position.key}/proposer/"

        def build_prompt(first_messages: list[Message]) -> list[Message]:
            while True:
                solutions = (
                    PastSolution(candidate.summary, votes.votes_for, votes.votes_against, votes.report)
                    for candidate, votes in shown
                )
                view = RoleView(get_problem(prompt), tuple(first_messages), past=tuple(solutions))
                messages = self.caller.roles["proposer"].build(view)
                if not shown or self.caller.clients[model].fits_prompt_limit(messages):
                    return messages
                shown.pop(0)

        return await self.caller.run_episode("proposer", branch_model, key, self.make_environment, prompt, build_prompt)

    def _lacks_answer(self, prompt: Prompt, transcript: Transcript) -> bool:
        """Whether an episode ended without a readable answer; False if the environment computes its own score."""
        if not self.uses_reward:
            return False
        if transcript.score is None:
            return True
        if self.has_ground_truth(prompt):
            return transcript.score.outcome is Outcome.WRONG_FORMAT
        return extract_answer(transcript.last_message) is None

    def _make_grade(self, prompt: Prompt, transcript: Transcript) -> Grade | None:
        """Return the grade of a finished episode; None without a ground truth or if the episode failed."""
        if transcript.failure or (self.uses_reward and not self.has_ground_truth(prompt)):
            return None
        score = transcript.score or Score(0.0, reason="the episode ended without a score")
        if score.outcome.failed:
            return Grade(score.outcome, None, None, score.reason)
        return Grade(score.outcome, score.reward, score.accuracy, score.reason)

    async def _judge(self, view: RoleView, key: str, branch_model: str) -> Judgement:
        numbers = range(self.config.evolving.votes)
        verdicts = await gather_all(
            [self._verify(view, f"{key}/verifier.{number}", branch_model) for number in numbers]
        )
        reports = list_majority_reports(verdicts)
        report, votes = "\n\n".join(reports), [verdict.vote for verdict in verdicts]
        if len(reports) > 1:
            view = RoleView(view.question, solution=view.solution, reports=tuple(reports))
            merged, _ = await self.caller.ask_role("aggregator", branch_model, f"{key}/aggregator", view)
            report = report if merged is None else str(merged)
        return Judgement(key, votes.count(True), votes.count(False), report, tuple(verdicts))

    async def _verify(self, view: RoleView, call_key: str, branch_model: str) -> Verdict:
        model = self.caller.get_model_name("verifier", branch_model)
        report, failure = await self.caller.ask_role("verifier", branch_model, call_key, view)
        return Verdict(model, failure=failure) if failure else Verdict(model, report.vote, report.text)


def list_majority_reports(verdicts: Sequence[Verdict]) -> list[str]:
    """List the distinct reports of the verifiers that voted with the majority. A tie counts as a majority against."""
    votes = [verdict.vote for verdict in verdicts]
    majority = votes.count(True) > votes.count(False)
    reports = [verdict.report for verdict in verdicts if verdict.vote is majority and verdict.report]
    return list(dict.fromkeys(reports))


async def gather_all(jobs: Sequence[Coroutine[object, object, T]]) -> list[T]:
    """Like asyncio.gather, but wait for all jobs before raising, so that calls in flight are still logged.

    EvolutionStopped is raised only if no job raised another error.
    """
    results = await asyncio.gather(*jobs, return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:
        raise next((error for error in errors if not isinstance(error, EvolutionStopped)), errors[0])
    return [result for result in results if not isinstance(result, BaseException)]


def select_past_solutions(
    pool: Pool, problem: int, before_round: int, count: int, memory_type: MemoryType
) -> list[JudgedCandidate]:
    """Select at most `count` candidates of earlier rounds for a proposer's prompt. Returns the oldest first."""
    judged = pool.get_judged_candidates(problem, before_round)
    steps = [Step(candidate.summary, [], judgement.share_of_votes) for candidate, judgement in judged]
    chosen = {id(step) for step in select_steps(steps, count, memory_type)} if count else ()
    return [one for step, one in zip(steps, judged, strict=True) if id(step) in chosen]


def compute_prompt_digest(prompt: Prompt) -> str:
    """Return a digest of a problem's data row, to detect changed data when a run resumes."""
    row = msgspec.json.encode([prompt.data_source, prompt.content, prompt.ground_truth_text])
    return hashlib.blake2b(row, digest_size=8).hexdigest()
