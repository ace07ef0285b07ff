"""Entry point of all fine-tuning tasks: parse, check, print the plan, train."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from alphaapollo.config.errors import exit_on_config_error, report_error
from alphaapollo.config.load import load_config
from alphaapollo.config.schema import TuningConfig

C = TypeVar("C", bound=TuningConfig)


def run_finetuning(schema: type[C], name: str, task: Callable[[], Any], argv: Sequence[str] | None) -> int:
    """Return the exit code: 0 done, 1 failed, 2 refused before the start, 130 interrupted.

    task: imports and builds the task, called after the configuration was read.
    """
    with exit_on_config_error():
        config = load_config(schema, name, sys.argv[1:] if argv is None else argv)
        from alphaapollo.finetuning.prepare import prepare, print_plan
        from alphaapollo.finetuning.run import run
        from alphaapollo.launch.restarts import run_with_restarts
        from alphaapollo.launch.resume import completed_message, interrupted_message
        from alphaapollo.launch.run_command import run_in_folder
        from alphaapollo.utils.folder_lock import check_not_in_use

        try:
            if not config.trainer.dry_run:
                check_not_in_use(config.trainer.folder)
            plan = prepare(task(), config)
        except ValueError as error:
            return report_error(error, 2)
    print_plan(plan)
    folder = config.trainer.folder
    if config.trainer.dry_run:
        print("dry run: the configuration is valid, nothing was started.")
        return 0
    if plan.is_complete:
        print(completed_message(folder, plan.total_steps))
        return 0
    return run_in_folder(folder, lambda: run_with_restarts(plan, run), lambda: interrupted_message(folder))
