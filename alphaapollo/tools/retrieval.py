"""`python -m alphaapollo.tools.retrieval build|query`: the subcommand `alphaapollo search-index`."""

from functools import partial

from alphaapollo.processes.entry_point import run_plugin_command, run_program

main = partial(run_plugin_command, "search-index")


if __name__ == "__main__":
    run_program(main)
