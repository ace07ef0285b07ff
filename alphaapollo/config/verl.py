"""Look up verl's configuration keys: renamed, dropped, not supported, or with another meaning here (verl_keys.yaml)."""

from __future__ import annotations

from collections.abc import Iterator, Set
from fnmatch import fnmatchcase
from functools import cache
from importlib import resources

import yaml
from pydantic import BaseModel

from alphaapollo.config.keys import COMMANDS, format_value, list_sections
from alphaapollo.config.schema import Config
from alphaapollo.utils.json_types import JsonObject

MINI_BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size"
Tables = dict[str, JsonObject]


@cache
def load_verl_key_tables() -> dict[str, Tables]:
    """Load verl_keys.yaml: {command: {table: entries}}. A comment at the start of the file describes the tables."""
    text = resources.files("alphaapollo.config").joinpath("verl_keys.yaml").read_text(encoding="utf-8")
    tables: dict[str, Tables] = yaml.safe_load(text)
    return tables


@cache
def list_verl_key_statuses() -> dict[str, dict[str, str]]:
    """Return the status of verl's keys: {command: {key or pattern with `*`: e.g. "renamed to env.max_steps"}}."""
    statuses = {}
    for command, tables in load_verl_key_tables().items():
        renamed = {key: f"renamed to {new}" for key, new in tables["renamed"].items()}
        dropped = {key: f"dropped because {reason}" for reason, keys in tables["dropped"].items() for key in keys}
        missing = {key: f"not supported ({reason})" for reason, keys in tables["not_supported"].items() for key in keys}
        statuses[command] = renamed | dropped | missing
    return statuses


def find_verl_key_status(name: str, *schemas: type[BaseModel]) -> str | None:
    """Return what became of a verl key, e.g. `renamed to env.max_steps`; None if verl does not have the key.

    Keys are listed by name or pattern (`critic.*`) for each schema. Precedence: names over patterns, then schemas that
    have the key's section over others, then longer over shorter patterns.
    """
    found: list[tuple[bool, bool, int, str]] = []
    for schema in schemas:
        has_section = name.split(".")[0] in list_sections(schema)
        for pattern, status in list_verl_key_statuses().get(_get_command_name(schema), {}).items():
            if fnmatchcase(name, pattern) or (pattern.endswith(".*") and fnmatchcase(name, pattern[:-2])):
                found.append(("*" not in pattern, has_section, len(pattern), status))
    return max(found)[3] if found else None


def _get_command_name(schema: type[BaseModel]) -> str:
    """Return the command whose configuration has this schema; "" for the settings of an environment."""
    return next((command for command, known in COMMANDS.items() if known is schema), "")


def find_differences_from_verl(schema: type[BaseModel]) -> dict[str, str]:
    """Return the accepted keys with another meaning or default in verl: {key: difference}."""
    tables = load_verl_key_tables()[_get_command_name(schema)]
    meanings = tables.get("meaning", {})
    defaults = {key: f"verl's default is {format_value(value)}" for key, value in tables.get("default", {}).items()}
    return {
        key: "; ".join(text for text in (meanings.get(key), defaults.get(key)) if text)
        for key in sorted(meanings | defaults)
    }


def find_values_meant_for_verl(config: Config, user_keys: Set[str]) -> Iterator[str]:
    """Yield a warning for each key that works differently in verl, if the user's value seems to be meant for verl."""
    size, samples = config.actor_rollout_ref.actor.ppo_mini_batch_size, config.group_size
    if MINI_BATCH in user_keys and samples > 1 and size <= config.data.train_batch_size:  # as verl requires
        yield (
            f"{MINI_BATCH}={size} counts trajectories here, prompts in verl: this run has {config.steps_per_iteration} "
            f"optimizer steps per iteration. For verl's {size} prompts x {samples} samples set {size * samples}."
        )
