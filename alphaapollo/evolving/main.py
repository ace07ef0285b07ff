"""Improve answers at inference time: `python -m alphaapollo.evolving.main data.path=... models.policy.path=...`"""

from alphaapollo.config.schema import EvolvingConfig
from alphaapollo.launch.command import make_command
from alphaapollo.processes.entry_point import run_program

main = make_command(EvolvingConfig, "evolving", "alphaapollo.evolving.run")


if __name__ == "__main__":
    run_program(main)
