"""Supervised fine-tuning: `python -m alphaapollo.trainer.main_sft data.train_files=... model.path=...`

Several ranks: `torchrun --nproc_per_node 8 -m alphaapollo.trainer.main_sft ...`
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext

from alphaapollo.caller import command
from alphaapollo.config.errors import failed, reported
from alphaapollo.config.load import load_config
from alphaapollo.config.schema import SftConfig
from alphaapollo.folder_lock import FolderInUseError, lone_driver


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Compose, check, print the plan, train. Returns 0 done, 1 failed, 2 refused before the start, 130 interrupted."""
    with reported():
        config = load_config(SftConfig, "sft", sys.argv[1:] if argv is None else argv)
        from alphaapollo.finetuning.sft import prepare, print_plan, train  # torch from here on
        from alphaapollo.startup.resume import already_complete, interrupted

        try:
            run = prepare(config)
        except ValueError as error:
            return failed(error, 2)
    is_main = os.environ.get("RANK", "0") == "0"
    if is_main:
        print_plan(run)
    if config.trainer.dry_run:
        if is_main:
            print("dry run: the configuration is sound, nothing was started.")
        return 0
    if run.complete:
        if is_main:
            print(already_complete(run.folder, run.total_steps))
        return 0
    try:
        with lone_driver(run.folder) if is_main else nullcontext():
            train(run)
    except FolderInUseError as error:
        return failed(error, 2)
    except KeyboardInterrupt:
        print(f"\n{interrupted(run.folder)}", file=sys.stderr)
        return 130
    except (ValueError, OSError, ArithmeticError) as error:
        return failed(error, 1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
