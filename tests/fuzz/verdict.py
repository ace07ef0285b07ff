"""A case of bad input, its outcome, and the counts of all outcomes."""

from __future__ import annotations

import json
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

TIME_LIMIT = 60  # seconds after which a case counts as hung


class Hang(BaseException):
    """BaseException, so that no `except Exception` catches it."""


@dataclass(frozen=True)
class Case:
    """`attempt` returns the name of an outcome ("accepted", "masked", ...) or raises an error. Its message must contain
    one of `names`, the keys or the file that the user has to fix."""

    shown: str
    attempt: Callable[[], str]
    names: tuple[str, ...]


@dataclass
class Report:
    cases: int = 0
    failures: list[str] = field(default_factory=list)
    kinds: dict[str, Counter[str]] = field(default_factory=dict)

    def take(self, kind: str, case: Case) -> None:
        outcome, problem = judge(case)
        self.cases += 1
        self.kinds.setdefault(kind, Counter())[outcome] += 1
        if problem:
            self.failures.append(f"{kind}: {case.shown[:400]}: {problem}")

    def summary(self) -> str:
        kinds = {kind: dict(sorted(counts.items())) for kind, counts in self.kinds.items()}
        return json.dumps({"cases": self.cases, "failures": len(self.failures), "kinds": kinds})


def judge(case: Case) -> tuple[str, str]:
    """The outcome, and the problem with it ("" if there is none)."""
    try:
        with time_limit(TIME_LIMIT):
            return case.attempt(), ""
    except ValueError as error:
        return ("refused", "") if is_clear(error, case.names) else ("failed", f"unclear: {describe_error(error)}")
    except Hang as hang:
        return "failed", f"no end within {TIME_LIMIT} s: {describe_error(hang)}"
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # noqa: BLE001 any other error is a failure
        return "failed", describe_error(error)


def is_clear(error: ValueError, names: tuple[str, ...]) -> bool:
    """Whether the error is the project's own and names its cause."""
    message = str(error)
    return not isinstance(error, UnicodeError) and any(name in message for name in names)


def describe_error(error: BaseException) -> str:
    where = traceback.extract_tb(error.__traceback__)
    last = [f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in where[-4:]]
    return f"{type(error).__name__}: {str(error)[:300]!r} ({' > '.join(last)})"


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    def on_alarm(number: int, frame: FrameType | None) -> Any:
        raise Hang

    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
