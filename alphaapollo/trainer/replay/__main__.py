"""`python -m alphaapollo.trainer.replay DIR`: the subcommand `alphaapollo replay`."""

from functools import partial

from alphaapollo.processes.entry_point import run_plugin_command, run_program

main = partial(run_plugin_command, "replay")


if __name__ == "__main__":
    run_program(main)
