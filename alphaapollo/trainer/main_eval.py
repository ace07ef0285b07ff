"""Score existing responses: `python -m alphaapollo.trainer.main_eval data.path=...`"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from alphaapollo.config.errors import exit_on_config_error, report_error
from alphaapollo.config.load import load_config
from alphaapollo.config.schema import EvalConfig
from alphaapollo.observability.console import Console
from alphaapollo.processes.entry_point import entry_point, run_program


@entry_point
def main(argv: Sequence[str] | None = None) -> int:
    """Grade the responses of a file. Returns 0 if done, 1 if failed, 2 if the input is invalid, 130 if interrupted."""
    with exit_on_config_error():
        config = load_config(EvalConfig, "eval", sys.argv[1:] if argv is None else argv)
    is_prepared = False
    try:
        with Console().open(str(config.trainer.folder)) as console:
            from alphaapollo.trainer.evaluation.scoring import grade_and_write_report, prepare_problems

            problems = prepare_problems(config, console)
            is_prepared = True
            asyncio.run(grade_and_write_report(config, problems, console))
    except (ValueError, OSError) as error:
        return report_error(error, 1 if is_prepared or not isinstance(error, ValueError) else 2)
    return 0


if __name__ == "__main__":
    run_program(main)
