"""Environments by name. Importing this package registers the built-in environments."""

from alphaapollo.environments import informal_math as informal_math
from alphaapollo.environments import single_turn as single_turn
from alphaapollo.environments.base import check_environment as check_environment
from alphaapollo.environments.base import get_environment_spec as get_environment_spec
from alphaapollo.environments.base import register_environment as register_environment
