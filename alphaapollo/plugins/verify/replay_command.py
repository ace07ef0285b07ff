"""`alphaapollo replay DIR`: compute a recorded iteration again, without engines and Ray (docs/replay.md)."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence

from alphaapollo.config.errors import exit_on_config_error, report_error
from alphaapollo.processes.entry_point import entry_point
from alphaapollo.utils.hub import expand_home

USAGE = """python -m alphaapollo.trainer.replay DIR [--float64] [KEY=VALUE ...]

Replays an iteration that trainer.record_steps recorded in DIR (<run>/recorded/step_N): computes it with the same
functions and compares the results (docs/replay.md)."""


@entry_point
def main(argv: Sequence[str] | None = None) -> int:
    """Compute a recorded iteration again and compare the results.

    Returns 0 if the results are equal, or differ because an option changes the computation; 1 if they differ otherwise
    or the replay failed; 2 if the input is invalid; 130 if interrupted.
    """
    parser = argparse.ArgumentParser(usage=USAGE, allow_abbrev=False)
    parser.add_argument("recording", metavar="DIR", type=expand_home, help="the recorded iteration")
    parser.add_argument("--float64", action="store_true", help="model, log-probs, advantages and update in float64")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="change a setting to see its effect")
    options = parser.parse_intermixed_args(argv)
    with exit_on_config_error():
        from alphaapollo.controller.errors import REPORTED_ERRORS
        from alphaapollo.plugins.verify.replay import prepare_replay, print_and_check_comparison, replay

        try:
            prepared = prepare_replay(options.recording, options.overrides, options.float64)
        except ValueError as error:
            return report_error(error, 2)
    try:
        outcome = asyncio.run(replay(prepared))
    except REPORTED_ERRORS as error:
        return report_error(error, 1)
    return 0 if print_and_check_comparison(prepared, outcome) else 1
