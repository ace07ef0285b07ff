"""verification.jsonl: quantities of an update that `alphaapollo verify` compared with its reference."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from alphaapollo.runs.record_files import read_records, write_records

CHECKS, OLD_CHECKS = "verification.jsonl", "verification.json"  # the latter before format 3
LARGEST = sys.float_info.max  # replaces deviations that are infinite or NaN, which JSON lacks


@dataclass(frozen=True)
class Check:
    """A compared quantity."""

    quantity: str
    where: str  # token or tensor with the largest deviation
    deviation: float
    tolerance: float
    reason: str  # of the tolerance, or why the reference does not cover the quantity
    covered: bool = True

    @property
    def passed(self) -> bool:
        return not self.covered or self.deviation <= self.tolerance

    @property
    def verdict(self) -> str:
        return ("ok" if self.passed else "FAILED") if self.covered else "not covered"


def summarize(checks: Sequence[Check]) -> str:
    """Say in one line whether the update is right, and which quantity differs first."""
    covered = [check for check in checks if check.covered]
    names = ", ".join(f"{check.quantity} ({check.reason})" for check in checks if not check.covered)
    others = f", not covered: {names}" if names else ""
    first = next((check for check in covered if not check.passed), None)
    if first:
        found = f"{first.quantity} differs by {first.deviation:.1e} ({first.where})"
        return f"{found}, more than {first.tolerance:.0e}{others}"
    return f"{len(covered)} of {len(covered)} quantities agree with the reference{others}"


def write_checks(folder: Path, checks: Sequence[Check]) -> None:
    finite = [replace(c, deviation=min(c.deviation, LARGEST) if c.deviation >= 0 else LARGEST) for c in checks]
    write_records(folder / CHECKS, finite)


def read_checks(folder: Path) -> list[Check]:
    """Read the checks of a run or recording; empty if there are none, or the file is damaged."""
    return read_records(folder / CHECKS, Check) or read_records(folder / OLD_CHECKS, Check)
