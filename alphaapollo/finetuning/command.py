"""The command of every kind of fine-tuning: parse, check, print the plan, train."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from alphaapollo.config.errors import failed, reported
from alphaapollo.config.load import load_config
from alphaapollo.config.schema import TuningConfig

C = TypeVar("C", bound=TuningConfig)


def tune(schema: type[C], name: str, station: Callable[[], Any], argv: Sequence[str] | None) -> int:
    """Returns 0 done, 1 failed, 2 refused before the start, 130 interrupted.

    station: imports and makes the kind of fine-tuning, once the configuration is read: a wrong key is told before.
    """
    with reported():
        config = load_config(schema, name, sys.argv[1:] if argv is None else argv)
        from alphaapollo.finetuning.prepare import prepare, print_plan
        from alphaapollo.finetuning.run import run
        from alphaapollo.launch.restarts import run_with_restarts
        from alphaapollo.launch.resume import already_complete, interrupted
        from alphaapollo.launch.run_command import drive
        from alphaapollo.utils.folder_lock import refuse_in_use

        try:
            if not config.trainer.dry_run:
                refuse_in_use(config.trainer.folder)
            prepared = prepare(station(), config)
        except ValueError as error:
            return failed(error, 2)
    print_plan(prepared)
    folder = config.trainer.folder
    if config.trainer.dry_run:
        print("dry run: the configuration is sound, nothing was started.")
        return 0
    if prepared.complete:
        print(already_complete(folder, prepared.total_steps))
        return 0
    return drive(folder, lambda: run_with_restarts(prepared, run), lambda: interrupted(folder))
