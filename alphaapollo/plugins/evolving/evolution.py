"""Evolution of one run: several rounds of solving all problems.

propose -> ask for a missing answer -> summarise -> grade -> verify (votes and reports; the majority's are merged)

A round covers all problems before the next round starts, so all problems are in the same round when the budget ends.
Each step first looks for its result in the pool, so a resumed run repeats the steps and makes only the missing calls.

With env.env_name=agent, programs of the user propose. A program runs in a session of its own for each candidate. Each
of its requests is a call of the proposer's model.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Never, TypeVar

import msgspec

from alphaapollo.engines.agent_sessions import AgentSession, Request, list_new_messages
from alphaapollo.engines.types import EngineError
from alphaapollo.environments.base import Environment, ScoreFn
from alphaapollo.environments.informal_math import get_problem
from alphaapollo.environments.memory import MemoryType, Step, select_steps
from alphaapollo.observability.majority_vote import extract_answer
from alphaapollo.plugins.evolving.calls import EvolutionStopped, RoleCaller, Transcript
from alphaapollo.plugins.evolving.model_clients import EngineClient, ModelCallError
from alphaapollo.plugins.evolving.pool import (
    Candidate,
    Grade,
    JudgedCandidate,
    Judgement,
    ModelCall,
    Pool,
    Position,
    Verdict,
)
from alphaapollo.plugins.evolving.roles import ASK_FOR_ANSWER, ModelReply, PastSolution, RoleView, make_user_chat
from alphaapollo.plugins.evolving.settings import EvolvingConfig
from alphaapollo.rollout.agents.runner import AgentRunner, open_agent_runner
from alphaapollo.rollout.environment_replies import check_messages
from alphaapollo.rollout.episode import EpisodeTask
from alphaapollo.runs.rollout_log import compute_prompt_digest
from alphaapollo.types import EpisodeEnd, Message, Outcome, Prompt, Sampling, Score, Turn

T = TypeVar("T")


@dataclass(frozen=True)
class Evolution:
    """Evolution of one run.

    Args:
        grade: the reward function; returns a failed score if a problem has no ground truth.
        uses_reward: whether the environment scores with `grade`.
        on_round: function called with the round number after each round, also after an incomplete round.
        on_solution: function called after each solution, also if the pool already had it.
        agents: proposers by model name, with env.env_name=agent.
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
    agents: Mapping[str, AgentProposer] = field(default_factory=dict)

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
            if not (self.agents or transcript.failure) and self._lacks_answer(prompt, transcript):
                chat = [*transcript.messages, Message(role="user", content=ASK_FOR_ANSWER)]
                reply = await self.caller.call_model("proposer", branch_model, f"{key}/proposer/answer", chat)
                transcript.messages = [*chat, Message(role="assistant", content=reply.text)]
                transcript.score = await self.grade(prompt, reply.text)
        except ModelCallError as error:
            transcript = Transcript(failure=f"proposer: {error}")
        if not transcript.failure:
            view = RoleView(get_problem(prompt), solution=transcript.text)
            text, *_ = await self.caller.ask_role("summariser", branch_model, f"{key}/summariser", view)
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

        if self.agents:
            return await self.agents[model].propose(prompt, key, position.index, build_prompt)
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
            merged, *_ = await self.caller.ask_role("aggregator", branch_model, f"{key}/aggregator", view)
            report = report if merged is None else str(merged)
        return Judgement(key, votes.count(True), votes.count(False), report, tuple(verdicts))

    async def _verify(self, view: RoleView, call_key: str, branch_model: str) -> Verdict:
        model = self.caller.get_model_name("verifier", branch_model)
        report, messages, failure = await self.caller.ask_role("verifier", branch_model, call_key, view)
        return Verdict(model, failure=failure) if failure else Verdict(model, messages, report.vote, report.text)


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
    return [judged_candidate for step, judged_candidate in zip(steps, judged, strict=True) if id(step) in chosen]


def compute_earlier_digest(prompt: Prompt) -> str:
    """Return the digest of a problem's data row in pools of earlier versions."""
    row = msgspec.json.encode([prompt.data_source, prompt.content, prompt.ground_truth_text])
    return hashlib.blake2b(row, digest_size=8).hexdigest()


@dataclass(frozen=True)
class AgentProposer:
    """Proposer that runs the program with one model. At most models.NAME.max_concurrent programs run at once."""

    caller: RoleCaller
    runner: AgentRunner
    sampling: Sampling
    slots: asyncio.Semaphore

    async def propose(
        self, prompt: Prompt, key: str, index: int, build_prompt: Callable[[list[Message]], list[Message]]
    ) -> Transcript:
        """Run the program with the proposer's prompt as the content of its task. Raises like `call_model`.
        key: prefix of the keys of its calls. index: of the solution."""
        first = make_user_chat(prompt.content) if isinstance(prompt.content, str) else list(prompt.content)
        messages = check_messages(build_prompt(first), "proposer.build")

        def make_no_environment(turns: Sequence[Turn]) -> Never:
            raise AssertionError("an agent has no environment")

        task = EpisodeTask(
            replace(prompt, content=messages),
            index,
            make_no_environment,
            self.sampling,
            lambda number: self.caller.derive_call_seed(f"{key}turn{number}"),
            name=key,
        )
        async with self.slots:
            session, end, score = await self.runner.run_session(task)
        return make_transcript(messages, session, end, score)


def make_transcript(prompt: list[Message], session: AgentSession, end: EpisodeEnd, score: Score) -> Transcript:
    """Make the transcript of a session: the chat that ends with its last answer. prompt: used if there is no answer."""
    transcript = Transcript(prompt, len(prompt), score=score)
    if session.answers:
        path = session.answers[-1].path
        chat = [(list_new_messages(answer.request, answer.parent), answer.text) for answer in path]
        transcript.messages = [
            message for new, text in chat for message in (*new, Message(role="assistant", content=text))
        ]
        transcript.num_prompt_messages = len(chat[0][0])
        transcript.score = score.add_turn_rewards([answer.reward or 0.0 for answer in session.answers])
    # Without prompt_error, the last answer was only cut, and is kept.
    if score.outcome is Outcome.ENVIRONMENT_FAILED or (session.prompt_error and end is EpisodeEnd.TOKEN_LIMIT):
        transcript.failure = score.reason
    return transcript


@asynccontextmanager
async def open_agent_proposers(
    config: EvolvingConfig, caller: RoleCaller, engines: Mapping[str, EngineClient], score: ScoreFn
) -> AsyncIterator[dict[str, AgentProposer]]:
    """Context manager that starts a proposer for each model that proposes, by model name."""
    role, data, proposers = config.roles.proposer, config.data, dict[str, AgentProposer]()
    max_tokens = role.max_tokens or data.max_response_length
    env = config.env.model_copy(update={"max_tokens_per_turn": max_tokens})

    async def grade(prompt: Prompt, text: str, turns: Sequence[Turn]) -> Score:
        return await score(prompt, text)

    async with AsyncExitStack() as stack:
        for name in config.proposer_models:
            client = engines[name]
            around = partial(log_request, caller, name, data.max_length, max_tokens)
            opened = open_agent_runner(client.engine, env, data, grade if env.agent.grade else None, around)
            runner = await stack.enter_async_context(opened)
            ids, stop = client.stop_token_ids, client.rollout.stop_strings
            sampling = Sampling(data.max_length, role.temperature, role.top_p, stop_token_ids=ids, stop=stop)
            slots = asyncio.Semaphore(config.models[name].max_concurrent)
            proposers[name] = AgentProposer(caller, runner, sampling, slots)
        yield proposers


async def log_request(
    caller: RoleCaller,
    model: str,
    max_length: int,
    max_tokens: int,
    request: Request,
    answer: Callable[[], Awaitable[None]],
) -> None:
    """Answer a request of a program as soon as it fits the budget, and log it as a call. An end of the run ends the
    session."""

    async def generate() -> ModelReply:
        await answer()
        if not request.answers:
            raise ModelCallError(request.session.prompt_error or "the request got no answer")
        completions = [one.completion for one in request.answers]
        text = "\n\n".join(one.text for one in request.answers)
        tokens = sum(len(completion.token_ids) for completion in completions)
        return ModelReply(text, request.seed, len(request.prompt_ids), tokens, completions[-1].stop_reason.value)

    key = f"{request.session.name}turn{request.session.num_started - 1}"
    call = ModelCall(key, "proposer", model, request.body_digest, seed=0)
    try:
        await caller.log_call(call, max_length - max_tokens, max_tokens, generate)
    except ModelCallError:
        pass  # the program has received the error
    except (EvolutionStopped, OSError) as error:
        request.record_engine_error(error)
        raise EngineError(str(error)) from error
