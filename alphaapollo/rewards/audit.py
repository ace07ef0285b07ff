"""`python -m alphaapollo.rewards.audit DATA`: the subcommand `alphaapollo audit-graders`."""

from functools import partial

from alphaapollo.processes.entry_point import run_plugin_command, run_program

main = partial(run_plugin_command, "audit-graders")


if __name__ == "__main__":
    run_program(main)
