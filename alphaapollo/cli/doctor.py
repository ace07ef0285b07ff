"""`alphaapollo doctor`: what this machine has of what a run needs. Reads and tries; changes nothing."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence

from alphaapollo.cli import machine_checks, network_checks
from alphaapollo.cli.finding import Finding

CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    machine_checks.system,
    machine_checks.python,
    machine_checks.packages,
    machine_checks.processors,
    machine_checks.gpus,
    machine_checks.shared_memory,
    machine_checks.disks,
    machine_checks.limits,
    network_checks.ports,
    network_checks.ray,
    machine_checks.sandbox,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line a finding, with what to do. Returns 1 where one fails."""
    argparse.ArgumentParser(
        prog="alphaapollo doctor",
        description="Machine, versions, GPU, shared memory, disk, limits, ports, Ray and sandbox: ok, warn or fail, "
        "each with what to do. Exit code 1 if one fails.",
    ).parse_args(argv)
    started = time.monotonic()
    found = [told(finding) for check in CHECKS for finding in check()]
    count = {level: sum(one.level == level for one in found) for level in ("ok", "warn", "fail")}
    seconds = time.monotonic() - started
    print(f"\n{count['ok']} ok, {count['warn']} to look at, {count['fail']} that stop a run ({seconds:.0f} s)")
    return int(count["fail"] > 0)


def told(finding: Finding) -> Finding:
    """As soon as it is known."""
    print(f"{finding.level:<5} {finding.what:<14} {finding.found}", flush=True)
    if finding.todo:
        print(f"{'':<20} -> {finding.todo}", flush=True)
    return finding
