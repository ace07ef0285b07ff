"""Differences from verl: keys with another meaning or default here, and values that seem to be meant for verl."""

from __future__ import annotations

from collections.abc import Iterator, Set

from pydantic import BaseModel

from alphaapollo.config.key_tables import KeyTable, load_project
from alphaapollo.config.keys import COMMANDS, format_value, list_keys
from alphaapollo.config.schema import Config

MINI_BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size"


def find_differences_from_verl(schema: type[BaseModel]) -> dict[str, str]:
    """Return the accepted keys with another meaning or default in verl: {key: difference}."""
    tables = load_project("verl").tables.items()
    table = next((table for command, table in tables if COMMANDS[command] is schema), KeyTable())
    defaults = {key: f"verl's default is {format_value(value)}" for key, value in table.default.items()}
    return {
        key: "; ".join(text for text in (table.meaning.get(key), defaults.get(key)) if text)
        for key in sorted((table.meaning | defaults).keys() & list_keys(schema).keys())
    }


def find_values_meant_for_verl(config: Config, user_keys: Set[str]) -> Iterator[str]:
    """Yield a warning for each key that works differently in verl, if the user's value seems to be meant for verl."""
    size, samples = config.actor_rollout_ref.actor.ppo_mini_batch_size, config.group_size
    if MINI_BATCH in user_keys and samples > 1 and size <= config.data.train_batch_size:  # as verl requires
        yield (
            f"{MINI_BATCH}={size} counts trajectories here, prompts in verl: this run has {config.steps_per_iteration} "
            f"optimizer steps per iteration. For verl's {size} prompts x {samples} samples set {size * samples}."
        )
