"""Train with reinforcement learning: `python -m alphaapollo.trainer.main_ppo algorithm.adv_estimator=grpo ...`"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from alphaapollo.config.errors import failed, reported
from alphaapollo.config.load import load_with_origin
from alphaapollo.config.schema import Config
from alphaapollo.utils.entry_point import command


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Compose, check, print the plan, run. Returns 0 done, 1 failed, 2 refused before the start, 130 interrupted."""
    with reported():
        config, origin = load_with_origin(Config, "ppo", sys.argv[1:] if argv is None else argv)
        from alphaapollo.launch.restarts import run_with_restarts  # torch: a wrong key is told before
        from alphaapollo.launch.resume import already_complete, interrupted
        from alphaapollo.launch.run_command import drive
        from alphaapollo.trainer.lifecycle import prepare, run
        from alphaapollo.utils.folder_lock import refuse_in_use

        try:
            if not config.trainer.dry_run:
                refuse_in_use(config.trainer.folder)
            prepared = prepare(config, origin)
        except ValueError as error:
            return failed(error, 2)
    if config.trainer.dry_run:
        print("dry run: the configuration is sound, nothing was started.")
        return 0
    if prepared.complete:
        print(already_complete(prepared.plan.folder, prepared.start.step))
        return 0
    folder = prepared.plan.folder
    return drive(folder, lambda: run_with_restarts(prepared, run), lambda: interrupted(folder))


if __name__ == "__main__":
    sys.exit(main())
