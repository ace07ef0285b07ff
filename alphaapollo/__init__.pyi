from alphaapollo.cli.api import dpo as dpo
from alphaapollo.cli.api import evaluate as evaluate
from alphaapollo.cli.api import evolve as evolve
from alphaapollo.cli.api import rl as rl
from alphaapollo.cli.api import sft as sft

__version__: str
