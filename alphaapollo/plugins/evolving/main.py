"""`alphaapollo evolve`: improve answers at inference time (docs/evolving.md)."""

from alphaapollo.cli.subcommand import Subcommand
from alphaapollo.launch.command import make_command
from alphaapollo.plugins.evolving.settings import EvolvingConfig

EVOLVE = Subcommand(
    "self-improvement at inference time: solve, verify, remember, repeat",
    "alphaapollo.plugins.evolving.main:main",
    "evolving",
    "models data.path evolving.rounds evolving.votes budget.tokens",
    "'models={policy:{path:outputs/model}}' data.path=problems.parquet",
)
main = make_command(EvolvingConfig, "evolving", "alphaapollo.plugins.evolving.run")
