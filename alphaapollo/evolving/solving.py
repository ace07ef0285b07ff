"""From a problem to a candidate: the proposer plays the run's environment with the best past solutions before its eyes;
where that gives no answer, it is asked for one; the summariser writes the solution short; the reward function says,
unseen by all of them, whether it is right."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from alphaapollo.environments.base import Environment, ScoreFn
from alphaapollo.environments.informal_math import question_of
from alphaapollo.evaluation.answers import answer_of
from alphaapollo.evolving.cast import Cast, NoResult
from alphaapollo.evolving.client import CallFailed
from alphaapollo.evolving.memory import Remembered
from alphaapollo.evolving.play import Played, play
from alphaapollo.evolving.pool import Pool
from alphaapollo.evolving.records import Candidate, Grade, Place
from alphaapollo.evolving.roles import Past, View
from alphaapollo.types import Message, Outcome, Prompt, Score

ASK_FOR_ANSWER = "You have not given an answer that could be read. Give your final answer now, and nothing else."


@dataclass(frozen=True)
class Truth:
    """The reward function, for the problems that it can grade."""

    score: ScoreFn  # as environments get it: what has no truth fails there, by name
    known: Callable[[Prompt], bool]
    graded: bool  # the environment scores by it

    @classmethod
    def of(cls, score: ScoreFn, known: Callable[[Prompt], bool], graded: bool) -> Truth:
        async def guarded(prompt: Prompt, text: str) -> Score:
            if known(prompt):
                return await score(prompt, text)
            return Score(math.nan, outcome=Outcome.GRADER_FAILED, reason="there is no ground truth")

        return cls(guarded, known, graded)


class Solver:
    """Makes candidates. `make`: a fresh environment, which grades by `truth`."""

    def __init__(self, cast: Cast, pool: Pool, truth: Truth, make: Callable[[], Environment]):
        self._cast, self._pool, self._truth, self._make = cast, pool, truth, make

    async def solve(self, prompt: Prompt, place: Place, model: str, past: Sequence[Remembered]) -> Candidate:
        """The candidate of this place, made now or found in the pool; one that could not be made says why."""
        if known := self._pool.candidates.get(place.key):
            return known
        own_model = self._cast["proposer"].model_for(model)
        seed = self._cast.asker.seed_of(f"{place.key}/proposer/turn0")
        candidate = await self._make_one(prompt, place, own_model, model, past, seed)
        self._pool.append(candidate)
        return candidate

    async def _make_one(
        self, prompt: Prompt, place: Place, model: str, branch: str, past: Sequence[Remembered], seed: int
    ) -> Candidate:
        shown: list[Remembered] = []
        try:
            played, shown = await self._play(prompt, place, model, past)
            if not played.failure and self._lacks_answer(prompt, played):
                await self._ask_for_answer(prompt, place, model, played)
            failure = played.failure
        except CallFailed as error:
            played, failure = Played(), f"proposer: {error}"
        summary, solution = "", played.text
        if not failure:
            summary = await self._summarise(prompt, place, branch, played)
        spent = self._pool.spent[place.key]
        return Candidate(
            key=place.key,
            place=place,
            model=model,
            parents=tuple(one.key for one, _ in shown),
            seed=seed,
            row=row_digest(prompt),
            messages=tuple(played.messages),
            asked=played.asked,
            solution=solution,
            summary=summary,
            answer=answer_of(played.last) if played.last else None,
            grade=self._grade(prompt, played, failure),
            tokens=spent.tokens,
            money=spent.money,
            failure=failure,
        )

    async def _play(
        self, prompt: Prompt, place: Place, model: str, past: Sequence[Remembered]
    ) -> tuple[Played, list[Remembered]]:
        """The episode, and the past solutions that there was room for."""
        actor, shown = self._cast["proposer"], list(past)

        def begin(asked: list[Message]) -> list[Message]:
            while True:
                view = View(question_of(prompt), tuple(asked), past=tuple(map(as_past, shown)))
                messages = actor.role.build(view)
                if not shown or self._cast.asker.fits(model, messages):
                    return messages
                shown.pop(0)  # the oldest

        async def reply(chat: list[Message], turn: int) -> str:
            key = f"{place.key}/proposer/turn{turn}"
            said = await self._cast.asker.ask(model, "proposer", key, chat, actor.sampling)
            return said.text

        played = await play(self._make, prompt, begin, reply, self._cast.limits, self._cast.sync_calls)
        return played, shown

    def _lacks_answer(self, prompt: Prompt, played: Played) -> bool:
        """Of an environment that scores itself, nobody is asked."""
        if not self._truth.graded:
            return False
        if not played.done or played.score is None:
            return True
        if self._truth.known(prompt):
            return played.score.outcome is Outcome.WRONG_FORMAT
        return answer_of(played.last) is None

    async def _ask_for_answer(self, prompt: Prompt, place: Place, model: str, played: Played) -> None:
        """Adds the question and its answer to the episode."""
        chat = [*played.messages, Message(role="user", content=ASK_FOR_ANSWER)]
        key = f"{place.key}/proposer/answer"
        said = await self._cast.asker.ask(model, "proposer", key, chat, self._cast["proposer"].sampling)
        played.messages = [*chat, Message(role="assistant", content=said.text)]
        played.score = await self._truth.score(prompt, said.text)

    async def _summarise(self, prompt: Prompt, place: Place, branch: str, played: Played) -> str:
        """The solution itself where there is no summariser, or none that says something: the call's failure is in the
        pool."""
        if "summariser" not in self._cast:
            return played.text
        view = View(question_of(prompt), solution=played.text)
        try:
            performed = await self._cast.perform("summariser", f"{place.key}/summariser", view, branch, prompt)
        except NoResult:
            return played.text
        return str(performed.value)

    def _grade(self, prompt: Prompt, played: Played, failure: str) -> Grade | None:
        if failure or (self._truth.graded and not self._truth.known(prompt)):
            return None
        return Grade.of(played.score or Score(0.0, reason="the episode ended without a score"))


def as_past(remembered: Remembered) -> Past:
    candidate, judgement = remembered
    return Past(candidate.summary, judgement.votes_for, judgement.votes_against, judgement.report)


def row_digest(prompt: Prompt) -> str:
    """Of what a solution answers and is graded by."""
    row = msgspec.json.encode([prompt.data_source, prompt.content, prompt.ground_truth])
    return hashlib.blake2b(row, digest_size=8).hexdigest()
