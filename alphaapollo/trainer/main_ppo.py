"""Train with reinforcement learning: `python -m alphaapollo.trainer.main_ppo algorithm.adv_estimator=grpo ...`"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from alphaapollo.config.errors import exit_on_config_error, report_error
from alphaapollo.config.load import load_with_origin
from alphaapollo.config.schema import Config
from alphaapollo.utils.entry_point import command


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Load the configuration, check it, print the plan, train. Returns 0 if done, 1 if failed, 2 if refused before
    the start, 130 if interrupted."""
    with exit_on_config_error():
        config, origin = load_with_origin(Config, "ppo", sys.argv[1:] if argv is None else argv)
        from alphaapollo.launch.restarts import run_with_restarts  # imports torch; wrong keys fail before
        from alphaapollo.launch.resume import completed_message, interrupted_message
        from alphaapollo.launch.run_command import run_in_folder
        from alphaapollo.trainer.lifecycle import prepare, run
        from alphaapollo.utils.folder_lock import check_not_in_use

        try:
            if not config.trainer.dry_run:
                check_not_in_use(config.trainer.folder)
            prepared = prepare(config, origin)
        except ValueError as error:
            return report_error(error, 2)
    if config.trainer.dry_run:
        print("dry run: the configuration is valid, nothing was started.")
        return 0
    if prepared.complete:
        print(completed_message(prepared.plan.folder, prepared.start.step))
        return 0
    folder = prepared.plan.folder
    return run_in_folder(folder, lambda: run_with_restarts(prepared, run), lambda: interrupted_message(folder))


if __name__ == "__main__":
    sys.exit(main())
