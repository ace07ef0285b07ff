"""The pool (pool.jsonl): append-only log of a self-evolution run, from which a killed run resumes.

    call        ModelCall    one request to a model and its reply or failure
    candidate   Candidate    a proposed solution, summarised and graded
    judgement   Judgement    the verifiers' votes and reports on a candidate

Each line is one record, written once and never changed. A failed call, candidate or verdict has a `failure`. Failures
are counted, but not as wrong answers or votes.
"""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from alphaapollo._version import __version__
from alphaapollo.types import Json, Message, Outcome
from alphaapollo.utils.disk import explain_write_errors
from alphaapollo.utils.redaction import find_secret_variables, map_texts, redact, replace_surrogates

FILE = "pool.jsonl"


class Position(msgspec.Struct, frozen=True, order=True):
    """Position of a candidate in the run."""

    problem: int  # id of the prompt
    round: int
    branch: int  # index of the proposing model in evolving.branches
    index: int  # index among the solutions of this branch and round

    @property
    def key(self) -> str:
        """Key of the candidate, e.g. `p17.r2.b0.i1`."""
        return f"p{self.problem}.r{self.round}.b{self.branch}.i{self.index}"


class ModelCall(msgspec.Struct, frozen=True, tag_field="kind", tag="call"):
    """Record of one request to a model. `key` identifies the call, e.g. `p17.r2.b0.i1/verifier.0/ask0.turn1`."""

    key: str
    role: str
    model: str
    digest: str  # of model, messages and sampling parameters
    seed: int
    time: float = 0.0  # seconds of run time at its end
    seconds: float = 0.0
    text: str = ""
    prompt_tokens: int = 0
    tokens: int = 0  # generated tokens
    money: float = 0.0
    stop: str = ""  # stop reason as the server reports it
    failure: str = ""  # empty: the call succeeded


class Grade(msgspec.Struct, frozen=True):
    """Result of the reward function for a solution. It is never shown to a model."""

    outcome: Outcome
    reward: float | None  # None if grading failed; the same applies to accuracy
    accuracy: float | None
    reason: str = ""


class Candidate(msgspec.Struct, frozen=True, tag_field="kind", tag="candidate"):
    """Record of one proposed solution of a problem."""

    key: str
    position: Position
    model: str
    parents: tuple[str, ...] = ()  # keys of the past solutions that the proposer was shown
    messages: tuple[Message, ...] = ()  # messages of the complete episode
    num_prompt_messages: int = 0  # number of messages in the first prompt
    solution: str = ""  # text of all messages after the prompt
    summary: str = ""  # text for verifiers and later proposers
    answer: str | None = None  # normalised answer: equal answers are equal strings
    grade: Grade | None = None  # None: the problem has no ground truth
    tokens: int = 0  # prompt and generated tokens of proposer and summariser
    failure: str = ""
    row: str = ""  # digest of the data row

    @property
    def is_right(self) -> bool | None:
        """Whether the solution is right; None if it could not be graded."""
        return self.grade.accuracy >= 1.0 if self.grade and self.grade.accuracy is not None else None


class Verdict(msgspec.Struct, frozen=True):
    """One verifier's vote and report."""

    model: str
    messages: tuple[Message, ...] = ()  # prompt of the verifier
    vote: bool | None = None  # True: the solution is right; None: no report was obtained
    report: str = ""
    failure: str = ""


class Judgement(msgspec.Struct, frozen=True, tag_field="kind", tag="judgement"):
    """Record of the verdicts on a candidate, with their votes and the merged report of the majority."""

    candidate: str  # its key
    votes_for: int
    votes_against: int
    report: str
    verdicts: tuple[Verdict, ...] = ()

    @property
    def num_votes(self) -> int:
        return self.votes_for + self.votes_against

    @property
    def share_of_votes(self) -> float:
        """Share of votes for the candidate; 0.5 without votes."""
        return self.votes_for / self.num_votes if self.num_votes else 0.5

    @property
    def is_accepted(self) -> bool | None:
        """Whether the majority votes for the candidate; None without votes. A tie counts as a majority against."""
        return self.votes_for > self.votes_against if self.num_votes else None


JudgedCandidate = tuple[Candidate, Judgement]
Record = ModelCall | Candidate | Judgement
RecordT = TypeVar("RecordT", bound=Record)


def clean_texts(value: Json) -> Json:
    """Redact secrets, and replace lone surrogates, in all texts of nested values."""
    secrets = find_secret_variables()
    return map_texts(value, lambda text: replace_surrogates(redact(text, secrets)))


@dataclass(frozen=True)
class Usage:
    """Usage of model calls: number of calls, tokens (prompt and generated) and money."""

    calls: int = 0
    tokens: int = 0
    money: float = 0.0

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.calls + other.calls, self.tokens + other.tokens, self.money + other.money)


class Pool:
    """In-memory index of pool.jsonl. To write: `with Pool(folder) as pool: pool.append(record)`

    The constructor only reads the file; it raises ValueError if a line other than the last is not a record. `with`
    opens the file for writing and removes an incomplete last line.
    """

    def __init__(self, folder: Path):
        self.path = folder / FILE
        self.calls: dict[str, ModelCall] = {}  # latest call of each key, because failed calls are repeated
        self.all_calls: list[ModelCall] = []
        self.candidates: dict[str, Candidate] = {}
        self.judgements: dict[str, Judgement] = {}
        self.usage: dict[str, Usage] = defaultdict(Usage)  # of the calls for each candidate
        self.total_usage = Usage()
        self._by_problem: dict[int, list[Candidate]] = defaultdict(list)
        *lines, last = self.path.read_bytes().split(b"\n") if self.path.exists() else [b""]
        self.incomplete_bytes = len(last)  # size of an incomplete last line
        self._complete_bytes = sum(len(line) + 1 for line in lines)
        decoder = msgspec.json.Decoder(Record)
        for number, line in enumerate(lines, start=1):
            try:
                self._index_record(decoder.decode(line))
            except msgspec.MsgspecError as error:
                raise ValueError(
                    f"line {number} of {self.path} is not a record of alphaapollo {__version__}: {error}. Restore the "
                    "file, use the version that wrote it (see format.json), or set another trainer.experiment_name."
                ) from error

    def __enter__(self) -> Pool:
        with explain_write_errors("the pool", self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab")
            self._file.truncate(self._complete_bytes)
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def append(self, record: RecordT) -> RecordT:
        """Append one record to the file (with fsync) and to the index. Returns it with clean texts."""
        record = msgspec.convert(clean_texts(msgspec.to_builtins(record)), type(record))
        with explain_write_errors("the pool", self.path):
            self._file.write(msgspec.json.encode(record) + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        self._index_record(record)
        return record

    @property
    def seconds(self) -> float:
        """Run time of all processes, up to the last call."""
        return max((call.time for call in self.all_calls), default=0.0)

    def get_candidates(
        self, problem: int, before_round: int | None = None, include_failed: bool = False
    ) -> list[Candidate]:
        """Return the candidates of a problem, ordered by round, branch and index."""
        selected = [
            candidate
            for candidate in self._by_problem.get(problem, [])
            if (include_failed or not candidate.failure)
            and (before_round is None or candidate.position.round < before_round)
        ]
        return sorted(selected, key=lambda candidate: candidate.position)

    def get_judged_candidates(self, problem: int, before_round: int | None = None) -> list[JudgedCandidate]:
        """Return (candidate, judgement) for the judged candidates of a problem, in the order of `get_candidates`."""
        candidates = self.get_candidates(problem, before_round)
        return [
            (candidate, self.judgements[candidate.key]) for candidate in candidates if candidate.key in self.judgements
        ]

    def rank_candidates(self, problem: int, before_round: int | None = None) -> list[Candidate]:
        """Return judged candidates of rounds < before_round, best first: highest vote share, shortest summary, oldest.
        The first one is the answer to the problem."""
        judged = self.get_judged_candidates(problem, before_round)
        return [
            candidate
            for candidate, _ in sorted(judged, key=lambda pair: (-pair[1].share_of_votes, len(pair[0].summary)))
        ]

    def _index_record(self, record: Record) -> None:
        match record:
            case ModelCall():
                self.calls[record.key] = record
                self.all_calls.append(record)
                usage = Usage(1, record.prompt_tokens + record.tokens, record.money)
                self.usage[record.key.partition("/")[0]] += usage
                self.total_usage += usage
            case Candidate():
                self.candidates[record.key] = record
                self._by_problem[record.position.problem].append(record)
            case Judgement():
                self.judgements[record.candidate] = record
