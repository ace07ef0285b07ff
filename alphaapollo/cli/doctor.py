"""`alphaapollo doctor`: check whether this machine can run a training. Changes nothing."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence

from alphaapollo.cli import machine_checks, network_checks
from alphaapollo.cli.check_result import CheckResult

CHECKS: tuple[Callable[[], Iterator[CheckResult]], ...] = (
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
    """Print one line per check, with a fix. Returns 1 if a check fails."""
    argparse.ArgumentParser(
        prog="alphaapollo doctor",
        description="Machine, versions, GPU, shared memory, disk, limits, ports, Ray and sandbox: ok, warn or fail, "
        "each with a fix. Exit code 1 if one fails.",
    ).parse_args(argv)
    started = time.monotonic()
    found = [print_result(result) for check in CHECKS for result in check()]
    count = {level: sum(one.level == level for one in found) for level in ("ok", "warn", "fail")}
    seconds = time.monotonic() - started
    print(f"\n{count['ok']} ok, {count['warn']} warnings, {count['fail']} failures ({seconds:.0f} s)")
    return int(count["fail"] > 0)


def print_result(result: CheckResult) -> CheckResult:
    """Print a result as soon as it is known."""
    print(f"{result.level:<5} {result.what:<14} {result.found}", flush=True)
    if result.todo:
        print(f"{'':<20} -> {result.todo}", flush=True)
    return result
