"""Environments by name. Importing this package registers the ones that come with the project."""

from alphaapollo.environments import single_turn as single_turn
from alphaapollo.environments.base import get_environment as get_environment
from alphaapollo.environments.base import register_environment as register_environment
