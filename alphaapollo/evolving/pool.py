"""pool.jsonl: append-only log of an evolution, from which a killed run resumes.

    call        ModelCall         one request to a model and its reply or failure
    candidate   Candidate         a proposed solution, summarised and graded
    verdict     VerifierVerdict   one verifier's vote and report on a candidate
    judgement   Judgement         the vote count of a candidate and the majority's report
    match       Match             one pair of the final tournament
    choice      Choice            the chosen candidate of a problem

Each line is one record. Records are written once, when complete, and never changed. A failed call, candidate, verdict
or match is a record with a `failure`; it is counted but never scored as a wrong answer or a vote.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from alphaapollo.observability.disk import writing
from alphaapollo.types import Message, Outcome, Score

FILE = "pool.jsonl"


class CandidateId(msgspec.Struct, frozen=True):
    """Position of a candidate in the run."""

    problem: int  # the prompt's id
    round: int
    branch: int
    index: int  # among the solutions of this branch and round

    @property
    def key(self) -> str:
        """`p17.r2.b0.i1`"""
        return f"p{self.problem}.r{self.round}.b{self.branch}.i{self.index}"


class ModelCall(msgspec.Struct, frozen=True, tag_field="kind", tag="call"):
    """One request to a model. `key` names its purpose, e.g. `p17.r2.b0.i1/verifier.0/ask0.turn1`."""

    key: str
    role: str
    model: str
    digest: str = msgspec.field(name="asked")  # of the model, the messages and the sampling parameters
    seed: int
    at: float  # seconds of run time when the call ended
    seconds: float
    text: str = ""
    prompt_tokens: int = 0
    tokens: int = 0  # generated
    money: float = 0.0
    stop: str = ""  # stop reason as the server reports it
    failure: str = ""  # empty: the call succeeded

    @property
    def owner(self) -> str:
        """Key of the candidate that the call belongs to, or `p17.final` for a tournament."""
        return self.key.partition("/")[0]


class Grade(msgspec.Struct, frozen=True):
    """Result of the reward function. No role ever sees it."""

    outcome: Outcome
    reward: float | None  # None if grading failed; the same for accuracy
    accuracy: float | None
    reason: str = ""

    @property
    def right(self) -> bool | None:
        """None if grading failed."""
        return None if self.accuracy is None else self.accuracy >= 1.0

    @classmethod
    def of(cls, score: Score) -> Grade:
        failed = score.outcome.failed
        return cls(score.outcome, None if failed else score.reward, None if failed else score.accuracy, score.reason)


class Candidate(msgspec.Struct, frozen=True, tag_field="kind", tag="candidate"):
    """One solution of one problem."""

    key: str
    place: CandidateId
    model: str
    parents: tuple[str, ...]  # keys of the past solutions that the proposer was shown
    seed: int  # of its first call
    messages: tuple[Message, ...] = ()  # the complete episode
    num_prompt_messages: int = msgspec.field(name="asked", default=0)  # how many of them are the first prompt
    solution: str = ""  # everything after the prompt
    summary: str = ""  # what verifiers and later proposers see
    answer: str | None = None  # normalised, so that equal answers are equal strings
    grade: Grade | None = None  # None: the problem has no ground truth
    tokens: int = 0  # read and generated, including its summary
    money: float = 0.0
    failure: str = ""
    row: str = ""  # digest of its data row

    @property
    def right(self) -> bool | None:
        """None if unknown."""
        return self.grade.right if self.grade else None


class VerifierVerdict(msgspec.Struct, frozen=True, tag_field="kind", tag="verdict"):
    """Vote and report of one verifier."""

    candidate: str
    index: int  # among the candidate's verifiers
    model: str
    messages: tuple[Message, ...] = ()  # its prompt
    vote: bool | None = None  # True: the solution is right; None: no report was obtained
    report: str = ""
    upheld: bool | None = None  # decision of the verifier of verifiers; None: there was none
    failure: str = ""

    @property
    def counts(self) -> bool:
        """Whether the vote is counted."""
        return self.vote is not None and self.upheld is not False


class Judgement(msgspec.Struct, frozen=True, tag_field="kind", tag="judgement"):
    """Vote count of one candidate and the merged report of the majority."""

    candidate: str
    votes_for: int
    votes_against: int
    report: str

    @property
    def votes(self) -> int:
        return self.votes_for + self.votes_against

    @property
    def share(self) -> float:
        """Share of votes for the candidate; 0.5 without votes."""
        return self.votes_for / self.votes if self.votes else 0.5

    @property
    def right(self) -> bool | None:
        """The majority's opinion; None without votes. A tie counts as against."""
        return self.votes_for > self.votes_against if self.votes else None


class Match(msgspec.Struct, frozen=True, tag_field="kind", tag="match"):
    """Comparison of two candidates by the referee, asked in both orders."""

    problem: int
    index: int  # within the problem's tournament
    first: str
    second: str
    winner: str
    votes_first: int
    votes_second: int
    failure: str = ""  # why there was no preference; then `first`, the one with more verifier votes, wins


class Choice(msgspec.Struct, frozen=True, tag_field="kind", tag="choice"):
    """The chosen candidate of a problem."""

    problem: int
    candidate: str | None  # None: the problem has no candidates
    how: str  # vote | tournament


JudgedCandidate = tuple[Candidate, Judgement]
Record = ModelCall | Candidate | VerifierVerdict | Judgement | Match | Choice


@dataclass(frozen=True)
class Usage:
    """Calls, tokens (read and generated) and money of one or more model calls."""

    calls: int = 0
    tokens: int = 0
    money: float = 0.0

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.calls + other.calls, self.tokens + other.tokens, self.money + other.money)

    def __sub__(self, other: Usage) -> Usage:
        return Usage(self.calls - other.calls, self.tokens - other.tokens, self.money - other.money)


class Pool:
    """In-memory index of pool.jsonl. `with Pool(folder) as pool: pool.append(record)`

    Creating it only reads the file. Opening it for writing removes an incomplete last line, left by a kill.

    Raises:
        ValueError: a line other than the last is not a record.
    """

    def __init__(self, folder: Path):
        self.path = folder / FILE
        self.calls: dict[str, ModelCall] = {}  # the latest call of each key: failed calls may be repeated
        self.all_calls: list[ModelCall] = []
        self.candidates: dict[str, Candidate] = {}
        self.verdicts: dict[str, dict[int, VerifierVerdict]] = defaultdict(dict)  # candidate -> verifier index
        self.judgements: dict[str, Judgement] = {}
        self.matches: dict[tuple[int, int], Match] = {}  # (problem, index)
        self.choices: dict[int, Choice] = {}
        self.usage: dict[str, Usage] = defaultdict(Usage)  # by ModelCall.owner
        self.seconds = 0.0  # run time of all processes, up to the last call
        self.torn_bytes = 0  # size of an incomplete last line
        self._by_problem: dict[int, list[Candidate]] = defaultdict(list)
        self._complete_bytes = 0
        for record in self._read():
            self._index(record)

    def __enter__(self) -> Pool:
        with writing("the pool", self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab")
            self._file.truncate(self._complete_bytes)
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def append(self, record: Record) -> None:
        """Write and fsync one record."""
        with writing("the pool", self.path):
            self._file.write(msgspec.json.encode(record) + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        self._index(record)

    def verdicts_of(self, candidate: str) -> list[VerifierVerdict]:
        """Verdicts on a candidate, ordered by verifier index."""
        return [verdict for _, verdict in sorted(self.verdicts.get(candidate, {}).items())]

    def candidates_of_problem(
        self, problem: int, before_round: int | None = None, failed: bool = False
    ) -> list[Candidate]:
        """Candidates of a problem, ordered by round, branch and index. failed: include failed candidates."""
        own = [
            candidate
            for candidate in self._by_problem.get(problem, [])
            if (failed or not candidate.failure) and (before_round is None or candidate.place.round < before_round)
        ]
        return sorted(own, key=lambda candidate: (candidate.place.round, candidate.place.branch, candidate.place.index))

    def judged_candidates(self, problem: int, before_round: int | None = None) -> list[JudgedCandidate]:
        """Judged candidates of a problem in the same order."""
        own = self.candidates_of_problem(problem, before_round)
        return [(one, self.judgements[one.key]) for one in own if one.key in self.judgements]

    @property
    def total(self) -> Usage:
        """Usage of all calls."""
        return sum(self.usage.values(), Usage())

    def _read(self) -> Iterator[Record]:
        if not self.path.exists():
            return
        decoder = msgspec.json.Decoder(Record)
        for number, line in enumerate(self.path.read_bytes().splitlines(keepends=True), start=1):
            if not line.endswith(b"\n"):
                self.torn_bytes = len(line)
                return
            try:
                record = decoder.decode(line)
            except msgspec.MsgspecError as error:
                raise ValueError(
                    f"{self.path}, line {number} is not a record of an evolution: {error}. Restore the file, or set "
                    "another trainer.experiment_name."
                ) from error
            self._complete_bytes += len(line)
            yield record

    def _index(self, record: Record) -> None:
        match record:
            case ModelCall():
                self.calls[record.key] = record
                self.all_calls.append(record)
                self.seconds = max(self.seconds, record.at)
                self.usage[record.owner] += Usage(1, record.prompt_tokens + record.tokens, record.money)
            case Candidate():
                self.candidates[record.key] = record
                self._by_problem[record.place.problem].append(record)
            case VerifierVerdict():
                self.verdicts[record.candidate][record.index] = record
            case Judgement():
                self.judgements[record.candidate] = record
            case Match():
                self.matches[record.problem, record.index] = record
            case Choice():
                self.choices[record.problem] = record
