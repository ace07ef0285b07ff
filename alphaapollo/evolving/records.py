"""What an evolution leaves, record by record: the vocabulary of this room, and the lines of pool.jsonl.

    Call        one call of a model: what was asked, what it said or why it did not
    Candidate   a proposer's solution, summarised and graded
    Verdict     what one verifier says of a candidate
    Judgement   the votes on a candidate, and the report of their majority: what memory holds
    Match       two candidates, and which of them the referee prefers
    Choice      a problem's answer

A record is written once, when it is whole, and never changed. What could not be had is a record too, with its
`failure`: it is counted, and never taken for a wrong answer or a vote.
"""

from __future__ import annotations

from dataclasses import dataclass

from alphaapollo.types import Message, Outcome, Score


@dataclass(frozen=True)
class Place:
    """Where in a run a candidate is made."""

    problem: int  # the prompt's id
    round: int
    branch: int
    index: int  # among the branch's solutions of the round

    @property
    def key(self) -> str:
        """`p17.r2.b0.i1`"""
        return f"p{self.problem}.r{self.round}.b{self.branch}.i{self.index}"


@dataclass(frozen=True)
class Call:
    """One call. `key` says what it was for, e.g. `p17.r2.b0.i1/verifier.0/ask0.turn1`: what stands before the first
    slash is the candidate (or `p17.final`)."""

    key: str
    role: str
    model: str
    asked: str  # digest of the messages and of how they were sampled
    seed: int
    at: float  # seconds that the run had been at work when it ended
    seconds: float
    text: str = ""
    prompt_tokens: int = 0
    tokens: int = 0  # written
    money: float = 0.0
    stop: str = ""  # why the model stopped, in its server's words
    failure: str = ""  # why there is no reply; empty: there is one

    @property
    def owner(self) -> str:
        """The candidate that it was made for."""
        return self.key.partition("/")[0]


@dataclass(frozen=True)
class Grade:
    """What the reward function says: the truth, which no role is ever shown."""

    outcome: Outcome
    reward: float | None  # None where it failed, and so is accuracy
    accuracy: float | None
    reason: str = ""

    @property
    def right(self) -> bool | None:
        """None: it could not be graded."""
        return None if self.accuracy is None else self.accuracy >= 1.0

    @classmethod
    def of(cls, score: Score) -> Grade:
        failed = score.outcome.failed
        return cls(score.outcome, None if failed else score.reward, None if failed else score.accuracy, score.reason)


@dataclass(frozen=True)
class Candidate:
    """One solution of one problem."""

    key: str
    place: Place
    model: str
    parents: tuple[str, ...]  # the candidates that its proposer was shown
    seed: int  # of its first call
    messages: tuple[Message, ...] = ()  # the whole episode
    asked: int = 0  # how many of them it began with: the question, past solutions
    solution: str = ""  # all that it wrote and what tools answered
    summary: str = ""  # what verifiers and later proposers are shown
    answer: str | None = None  # in a form in which equal answers are equal
    grade: Grade | None = None  # None: there is no ground truth
    tokens: int = 0  # read and written for it, its summary included
    money: float = 0.0
    failure: str = ""
    row: str = ""  # digest of the data row that it answers

    @property
    def right(self) -> bool | None:
        """None: it is not known."""
        return self.grade.right if self.grade else None


@dataclass(frozen=True)
class Verdict:
    """What one verifier says."""

    candidate: str
    index: int  # among the candidate's verifiers
    model: str
    messages: tuple[Message, ...] = ()  # what it was asked
    vote: bool | None = None  # is the candidate right? None: no report could be had
    report: str = ""
    upheld: bool | None = None  # what the verifier of verifiers says of the report; None: it was not asked
    failure: str = ""

    @property
    def counts(self) -> bool:
        """Its vote is one."""
        return self.vote is not None and self.upheld is not False


@dataclass(frozen=True)
class Judgement:
    """The verifiers' majority on a candidate. Nobody's vote: it says nothing."""

    candidate: str
    votes_for: int
    votes_against: int
    report: str  # of the majority, merged

    @property
    def share(self) -> float:
        """Of the votes, those for it; a half where there are none."""
        votes = self.votes_for + self.votes_against
        return self.votes_for / votes if votes else 0.5

    @property
    def right(self) -> bool | None:
        """What the majority says; None: nobody voted. A tie is against."""
        return self.votes_for > self.votes_against if self.votes_for + self.votes_against else None


@dataclass(frozen=True)
class Match:
    """Two candidates before the referee, in both orders."""

    problem: int
    index: int  # among the matches of the problem's tournament
    first: str
    second: str
    winner: str
    votes_first: int
    votes_second: int
    failure: str = ""  # why nobody preferred either: then `first`, the one with more votes, wins


@dataclass(frozen=True)
class Choice:
    """A problem's answer, chosen from all rounds."""

    problem: int
    candidate: str | None  # None: there is none to choose from
    how: str  # vote | tournament


Record = Call | Candidate | Verdict | Judgement | Match | Choice
KINDS: dict[str, type[Record]] = {
    kind.__name__.lower(): kind for kind in (Call, Candidate, Verdict, Judgement, Match, Choice)
}
