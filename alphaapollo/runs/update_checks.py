"""verification.json: quantities of an update that `alphaapollo verify` compared with its reference (docs/verify.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from alphaapollo.runs.record_files import read_records, write_records

CHECKS = "verification.json"


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
    others = f", {len(checks) - len(covered)} not covered" if len(covered) < len(checks) else ""
    first = next((check for check in covered if not check.passed), None)
    if first:
        return f"{first.quantity} differs by {first.deviation:.1e} ({first.where}), more than {first.tolerance:.0e}"
    return f"{len(covered)} of {len(covered)} quantities agree with the reference{others}"


def write_checks(folder: Path, checks: Sequence[Check]) -> None:
    write_records(folder / CHECKS, checks)


def read_checks(folder: Path) -> list[Check]:
    """Read the checks of a run or recording; empty if there are none, or the file is damaged."""
    return read_records(folder / CHECKS, Check)
