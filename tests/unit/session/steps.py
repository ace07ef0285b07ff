"""The first steps of a training run's preparation, for a machine that a test chooses."""

from __future__ import annotations

from alphaapollo.config.load import NO_USER_SETTINGS, UserSettings
from alphaapollo.config.schema import Config
from alphaapollo.controller.placement import Machine
from alphaapollo.observability.console import Console
from alphaapollo.trainer.setup.preparation import RlPreparation


def prepare_plan(config: Config, machine: Machine, user_settings: UserSettings = NO_USER_SETTINGS) -> RlPreparation:
    """Check the configuration and resolve the workers of a run."""
    prepared = RlPreparation(config, Console(), user_settings)
    prepared.machine = machine
    prepared.check_config()
    prepared.load_environment()
    prepared.resolve_workers()
    return prepared
