"""pool.jsonl: all that an evolution has come to, one record a line, only ever appended to, each on the disk before the
run goes on.

A run that was killed reads it, and asks nothing again that it holds: units that are whole (a candidate, a verdict, ...)
stand, and the calls of those that are not are answered from it. A last line that is torn is cut off.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from alphaapollo.evolving.records import KINDS, Call, Candidate, Choice, Judgement, Match, Record, Verdict
from alphaapollo.observability.disk import writing

FILE = "pool.jsonl"


@dataclass(frozen=True)
class Spent:
    """What calls took, or may take at most."""

    calls: int = 0
    tokens: int = 0
    money: float = 0.0

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.calls + other.calls, self.tokens + other.tokens, self.money + other.money)

    def __sub__(self, other: Spent) -> Spent:
        return Spent(self.calls - other.calls, self.tokens - other.tokens, self.money - other.money)


class Pool:
    """The records by what they are of. `with Pool(folder) as pool: pool.append(record)`

    Raises:
        ValueError: a line before the last is no record.
    """

    def __init__(self, folder: Path):
        self.path = folder / FILE
        self.calls: dict[str, Call] = {}  # the last of each key: one that failed may have been made again
        self.all_calls: list[Call] = []
        self.candidates: dict[str, Candidate] = {}
        self.verdicts: dict[str, dict[int, Verdict]] = defaultdict(dict)  # of a candidate, by the verifier
        self.judgements: dict[str, Judgement] = {}
        self.matches: dict[tuple[int, int], Match] = {}
        self.choices: dict[int, Choice] = {}
        self.spent: dict[str, Spent] = defaultdict(Spent)  # by the owner of the calls
        self.seconds = 0.0  # at work, until the last call
        self._by_problem: dict[int, list[Candidate]] = defaultdict(list)
        self.cut = 0  # bytes of a torn line, which go when the pool is opened for writing
        self._whole = 0
        for record in self._read():
            self._take(record)

    def __enter__(self) -> Pool:
        with writing("the pool", self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab")
            self._file.truncate(self._whole)
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def append(self, record: Record) -> None:
        """From here on it outlives this process, and this machine's power."""
        line = {"kind": type(record).__name__.lower(), **msgspec.to_builtins(record)}
        with writing("the pool", self.path):
            self._file.write(msgspec.json.encode(line) + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        self._take(record)

    def verdicts_of(self, candidate: str) -> list[Verdict]:
        """In the order of the verifiers."""
        own = self.verdicts.get(candidate, {})
        return [own[index] for index in sorted(own)]

    def of_problem(self, problem: int, before_round: int | None = None) -> list[Candidate]:
        """Its candidates that did not fail, by round, branch and index, whenever they came."""
        own = [
            one
            for one in self._by_problem.get(problem, [])
            if not one.failure and (before_round is None or one.place.round < before_round)
        ]
        return sorted(own, key=lambda one: (one.place.round, one.place.branch, one.place.index))

    @property
    def total(self) -> Spent:
        """Of all calls."""
        return sum(self.spent.values(), Spent())

    def _read(self) -> Iterator[Record]:
        if not self.path.exists():
            return
        for number, line in enumerate(self.path.read_bytes().splitlines(keepends=True), start=1):
            if not line.endswith(b"\n"):
                self.cut = len(line)
                return
            try:
                fields = msgspec.json.decode(line)
                record = msgspec.convert(fields, KINDS[fields.pop("kind")])
            except (msgspec.MsgspecError, KeyError, AttributeError, TypeError) as error:
                raise ValueError(
                    f"{self.path}, line {number} is no record of an evolution ({error}). Restore the file, or set "
                    "another trainer.experiment_name."
                ) from error
            self._whole += len(line)
            yield record

    def _take(self, record: Record) -> None:
        match record:
            case Call():
                self.calls[record.key] = record
                self.seconds = max(self.seconds, record.at)
                self.spent[record.owner] += Spent(1, record.prompt_tokens + record.tokens, record.money)
                self.all_calls.append(record)
            case Candidate():
                self.candidates[record.key] = record
                self._by_problem[record.place.problem].append(record)
            case Verdict():
                self.verdicts[record.candidate][record.index] = record
            case Judgement():
                self.judgements[record.candidate] = record
            case Match():
                self.matches[record.problem, record.index] = record
            case Choice():
                self.choices[record.problem] = record
