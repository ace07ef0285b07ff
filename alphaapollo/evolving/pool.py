"""The pool (pool.jsonl): append-only log of a self-evolution run, from which a killed run resumes.

    call        ModelCall         one request to a model and its reply or failure
    candidate   Candidate         a proposed solution, summarised and graded
    verdict     VerifierVerdict   one verifier's vote and report on a candidate
    judgement   Judgement         the vote count of a candidate and the majority's merged report
    choice      ChosenCandidate   the chosen candidate of a problem

Each line is one record, written once and never changed. A failed call, candidate or verdict is a record with a
`failure`. Failures are counted, but not as wrong answers or votes.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from alphaapollo.types import Message, Outcome, Score
from alphaapollo.utils.disk import explain_write_errors
from alphaapollo.utils.redaction import find_secret_variables, map_texts, redact, replace_surrogates

FILE = "pool.jsonl"


class CandidateId(msgspec.Struct, frozen=True):
    """Identifier of a candidate (one solution of a problem)."""

    problem: int  # id of the prompt
    round: int
    branch: int  # index of the proposing model in evolving.branches
    index: int  # index among the solutions of this branch and round

    @property
    def key(self) -> str:
        """Text form of the identifier, e.g. `p17.r2.b0.i1`."""
        return f"p{self.problem}.r{self.round}.b{self.branch}.i{self.index}"


class ModelCall(msgspec.Struct, frozen=True, tag_field="kind", tag="call"):
    """Record of one request to a model. `key` identifies the call, e.g. `p17.r2.b0.i1/verifier.0/ask0.turn1`."""

    key: str
    role: str
    model: str
    digest: str = msgspec.field(name="asked")  # digest of model, messages and sampling parameters
    seed: int
    ended_at: float = msgspec.field(name="at")  # seconds of run time
    seconds: float
    text: str = ""
    prompt_tokens: int = 0
    tokens: int = 0  # generated tokens
    money: float = 0.0
    stop: str = ""  # stop reason as the server reports it
    failure: str = ""  # empty: the call succeeded

    @property
    def usage_key(self) -> str:
        """Key of the call's candidate."""
        return self.key.partition("/")[0]


class Grade(msgspec.Struct, frozen=True):
    """Result of the reward function for a solution. It is never shown to a model."""

    outcome: Outcome
    reward: float | None  # None if grading failed; the same applies to accuracy
    accuracy: float | None
    reason: str = ""

    @property
    def is_right(self) -> bool | None:
        """Whether the solution is right; None if grading failed."""
        return None if self.accuracy is None else self.accuracy >= 1.0

    @classmethod
    def from_score(cls, score: Score) -> Grade:
        failed = score.outcome.failed
        return cls(score.outcome, None if failed else score.reward, None if failed else score.accuracy, score.reason)


class Candidate(msgspec.Struct, frozen=True, tag_field="kind", tag="candidate"):
    """Record of one proposed solution of a problem."""

    key: str
    id: CandidateId = msgspec.field(name="place")
    model: str
    parents: tuple[str, ...]  # keys of the past solutions that the proposer was shown
    seed: int  # seed of the first call, or of an agent's program
    messages: tuple[Message, ...] = ()  # messages of the complete episode
    num_prompt_messages: int = msgspec.field(name="asked", default=0)  # number of messages in the first prompt
    solution: str = ""  # text of all messages after the prompt
    summary: str = ""  # text for verifiers and later proposers
    answer: str | None = None  # normalised answer: equal answers are equal strings
    grade: Grade | None = None  # None: the problem has no ground truth
    tokens: int = 0  # prompt and generated tokens of proposer and summariser
    money: float = 0.0
    failure: str = ""
    row: str = ""  # digest of the data row

    @property
    def is_right(self) -> bool | None:
        """Whether the solution is right; None if it could not be graded."""
        return self.grade.is_right if self.grade else None


class VerifierVerdict(msgspec.Struct, frozen=True, tag_field="kind", tag="verdict"):
    """Record of one verifier's vote and report on a candidate."""

    candidate_key: str = msgspec.field(name="candidate")
    index: int  # index among the candidate's verifiers
    model: str
    messages: tuple[Message, ...] = ()  # prompt of the verifier
    vote: bool | None = None  # True: the solution is right; None: no report was obtained
    report: str = ""
    failure: str = ""


class Judgement(msgspec.Struct, frozen=True, tag_field="kind", tag="judgement"):
    """Record of a candidate's vote count and the merged report of the majority."""

    candidate_key: str = msgspec.field(name="candidate")
    votes_for: int
    votes_against: int
    report: str

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


class ChosenCandidate(msgspec.Struct, frozen=True, tag_field="kind", tag="choice"):
    """Record of the candidate that was chosen as the answer of a problem."""

    problem: int
    candidate: str | None  # None: the problem has no candidates


JudgedCandidate = tuple[Candidate, Judgement]
Record = ModelCall | Candidate | VerifierVerdict | Judgement | ChosenCandidate
RecordT = TypeVar("RecordT", bound=Record)


def clean_texts(value: Any) -> Any:
    """Redact secrets, and replace lone surrogates, in all texts of nested values."""
    known = find_secret_variables()
    return map_texts(value, lambda text: replace_surrogates(redact(text, known)))


@dataclass(frozen=True)
class Usage:
    """Usage of model calls: number of calls, tokens (prompt and generated) and money."""

    calls: int = 0
    tokens: int = 0
    money: float = 0.0

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.calls + other.calls, self.tokens + other.tokens, self.money + other.money)

    def __sub__(self, other: Usage) -> Usage:
        return Usage(self.calls - other.calls, self.tokens - other.tokens, self.money - other.money)


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
        self.verdicts: dict[str, dict[int, VerifierVerdict]] = defaultdict(dict)  # candidate -> verifier index
        self.judgements: dict[str, Judgement] = {}
        self.choices: dict[int, ChosenCandidate] = {}
        self.usage: dict[str, Usage] = defaultdict(Usage)  # usage by ModelCall.usage_key
        self.seconds = 0.0  # run time of all processes, up to the last call
        self.incomplete_bytes = 0  # size of an incomplete last line
        self._by_problem: dict[int, list[Candidate]] = defaultdict(list)
        self._complete_bytes = 0
        for record in self._read_records():
            self._index_record(record)

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
        values = msgspec.to_builtins(record)
        if (cleaned := clean_texts(values)) != values:
            record = msgspec.convert(cleaned, type(record))
        with explain_write_errors("the pool", self.path):
            self._file.write(msgspec.json.encode(record) + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        self._index_record(record)
        return record

    def get_verdicts(self, candidate_key: str) -> list[VerifierVerdict]:
        """Return the verdicts on a candidate, ordered by verifier index."""
        return [verdict for _, verdict in sorted(self.verdicts.get(candidate_key, {}).items())]

    def get_candidates(
        self, problem: int, before_round: int | None = None, include_failed: bool = False
    ) -> list[Candidate]:
        """Return the candidates of a problem, ordered by round, branch and index."""
        selected = [
            candidate
            for candidate in self._by_problem.get(problem, [])
            if (include_failed or not candidate.failure) and (before_round is None or candidate.id.round < before_round)
        ]
        return sorted(selected, key=lambda candidate: msgspec.structs.astuple(candidate.id))

    def get_judged_candidates(self, problem: int, before_round: int | None = None) -> list[JudgedCandidate]:
        """Return (candidate, judgement) for the judged candidates of a problem, in the order of `get_candidates`."""
        candidates = self.get_candidates(problem, before_round)
        return [(one, self.judgements[one.key]) for one in candidates if one.key in self.judgements]

    @property
    def total_usage(self) -> Usage:
        return sum(self.usage.values(), Usage())

    def _read_records(self) -> Iterator[Record]:
        if not self.path.exists():
            return
        decoder = msgspec.json.Decoder(Record)
        for number, line in enumerate(self.path.read_bytes().splitlines(keepends=True), start=1):
            if not line.endswith(b"\n"):
                self.incomplete_bytes = len(line)
                return
            try:
                record = decoder.decode(line)
            except msgspec.MsgspecError as error:
                raise ValueError(
                    f"line {number} of {self.path} is not a valid record: {error}. Restore the file, or set another "
                    "trainer.experiment_name."
                ) from error
            self._complete_bytes += len(line)
            yield record

    def _index_record(self, record: Record) -> None:
        match record:
            case ModelCall():
                self.calls[record.key] = record
                self.all_calls.append(record)
                self.seconds = max(self.seconds, record.ended_at)
                self.usage[record.usage_key] += Usage(1, record.prompt_tokens + record.tokens, record.money)
            case Candidate():
                self.candidates[record.key] = record
                self._by_problem[record.id.problem].append(record)
            case VerifierVerdict():
                self.verdicts[record.candidate_key][record.index] = record
            case Judgement():
                self.judgements[record.candidate_key] = record
            case ChosenCandidate():
                self.choices[record.problem] = record
