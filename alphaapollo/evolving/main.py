"""`python -m alphaapollo.evolving.main KEY=VALUE ...`: the subcommand `alphaapollo evolve`."""

from functools import partial

from alphaapollo.processes.entry_point import run_plugin_command, run_program

main = partial(run_plugin_command, "evolve")


if __name__ == "__main__":
    run_program(main)
