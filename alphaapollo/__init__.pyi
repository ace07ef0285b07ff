from alphaapollo.api import dpo as dpo
from alphaapollo.api import evaluate as evaluate
from alphaapollo.api import evolve as evolve
from alphaapollo.api import rl as rl
from alphaapollo.api import sft as sft

__version__: str
