"""Renamed and removed keys and sections of the configuration.

An old name works, with a warning, in the minor version that renames it. Later it is an error that names the new key.
Entries stay in the table, because saved configurations of earlier runs are read with it in every later version.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import reduce
from typing import Any

from packaging.version import Version

from alphaapollo._version import __version__
from alphaapollo.config.errors import ConfigError

RENAMED_KEYS: dict[str, tuple[str, str]] = {}
"""Old key or section -> (new key or section, version that renamed it), e.g. ("trainer.seed", "0.3.0"); oldest first."""
REMOVED_KEYS = {
    "actor_rollout_ref.ref.log_probs_ahead": "0.3.0: log-probs of the reference are computed after generation",
    "budget.reserve": "0.3.0: the end of a run calls no model",
    "data.curriculum.decay": "0.3.0: a pass rate is a moving average with weight 0.5",
    "data.curriculum.retire_above": "0.3.0: prompts with a pass rate of at least 0.95 are retired",
    "env.agent.accept_request_rewards": "0.3.0: use POST /v1/rewards with the header x-reward-key",
    "env.agent.model_names": "0.3.0: the model is named policy",
    "env.agent.reward_weight": "0.3.0: scale the rewards in your program",
    "evolving.asks": "0.3.0: a role is asked up to three times",
    "evolving.finalists": "0.3.0: the answer has the largest share of votes",
    "evolving.max_failures": "0.3.0: a run stops after 20 failures in a row",
    "evolving.select": "0.3.0: the answer has the largest share of votes",
    "preference.reference": "0.3.0: the reference's log-probs are computed once, before the first step",
    "roles.referee": "0.3.0: the answer has the largest share of votes",
    "roles.verifier_of_verifiers": "0.3.0: raise evolving.votes for reliable votes",
}
"""Removed key or section -> version that removed it, and what to write instead. Saved configurations may contain it."""


def find_new_name(name: str) -> str:
    """Return the new name of a key, or `name` if neither the key nor a section that contains it was renamed."""
    for old, (new, _) in RENAMED_KEYS.items():
        if f"{name}.".startswith(f"{old}."):
            name = new + name.removeprefix(old)
    return name


def describe_rename(name: str) -> str:
    """Return e.g. `renamed to trainer.seed (in 0.3.0; the old name stops working in 0.4.0)` or `removed in 0.3.0`.

    Returns "" if the key was neither renamed nor removed.
    """
    if removed := next((since for old, since in REMOVED_KEYS.items() if f"{name}.".startswith(f"{old}.")), ""):
        return f"removed in {removed}"
    since = next((since for old, (_, since) in RENAMED_KEYS.items() if f"{name}.".startswith(f"{old}.")), "")
    verb = "stops" if since and _still_works(since) else "stopped"
    return since and f"renamed to {find_new_name(name)} (in {since}; the old name {verb} working in {_find_end(since)})"


def check_not_set_twice(keys: Collection[str]) -> None:
    """Raise ConfigError if a key is set under its old name and under its new name."""
    old = [key for key in keys if (new := find_new_name(key)) != key and new in keys]
    if errors := [f"{key} is {describe_rename(key)}, and both are set. Remove {key}." for key in old]:
        raise ConfigError(errors)


def move_renamed_keys(values: dict[str, Any], is_saved: bool = False) -> list[str]:
    """Move values from old names to new names, in place. Returns the names in the table that were found.

    is_saved: whether `values` is a saved configuration, in which old names always work, and removed keys are dropped.
    """
    found = []
    for name in REMOVED_KEYS if is_saved else ():
        section, last = _find_section(values, name)
        if isinstance(section, dict):
            section.pop(last, None)
    for old, (new, since) in RENAMED_KEYS.items():
        section, last = _find_section(values, old)
        if isinstance(section, dict) and last in section and (is_saved or _still_works(since)):
            value = section.pop(last)
            _merge(values, reduce(lambda inner, part: {part: inner}, reversed(new.split(".")), value))
            found.append(old)
    return found


def _find_section(values: dict[str, Any], name: str) -> tuple[Any, str]:
    """Return the value at the dotted name without its last part, None if it does not exist, and the last part."""
    *outer, last = name.split(".")
    section: Any = values
    for part in outer:
        section = section.get(part) if isinstance(section, dict) else None
    return section, last


def _merge(values: dict[str, Any], others: Mapping[str, Any]) -> None:
    for name, value in others.items():
        if isinstance(value, dict) and isinstance(inner := values.get(name), dict):
            _merge(inner, value)
        else:
            values[name] = value


def _find_end(since: str) -> str:
    """Return the version in which a name stops working that was renamed in version `since`."""
    version = Version(since)
    return f"{version.major}.{version.minor + 1}.0"


def _still_works(since: str) -> bool:
    return Version(__version__) < Version(_find_end(since))
