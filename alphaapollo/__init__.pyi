from alphaapollo.api import dpo as dpo
from alphaapollo.api import evaluate as evaluate
from alphaapollo.api import rl as rl
from alphaapollo.api import sft as sft
from alphaapollo.own_loop.rows import make_row as make_row
from alphaapollo.own_loop.trainer import Trainer as Trainer
from alphaapollo.plugins.evolving.api import evolve as evolve

__version__: str
