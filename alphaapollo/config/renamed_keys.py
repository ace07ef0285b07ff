"""Renamed and removed keys and sections of the configuration.

A configuration that sets one of them is refused with an error that says what to write instead. Saved configurations of
earlier runs are converted with these tables in every later version, so entries are never removed.
"""

from __future__ import annotations

from alphaapollo.config.keys import find_nested_map, merge_maps, nest_value
from alphaapollo.utils.json_types import JsonObject

RENAMED_KEYS: dict[str, str] = {}
"""Old key or section -> new key or section; oldest first."""
REMOVED_KEYS = {
    "actor_rollout_ref.ref.log_probs_ahead": "log-probs of the reference are computed after generation",
    "budget.reserve": "the end of a run calls no model",
    "data.curriculum.decay": "a pass rate is a moving average with weight 0.5",
    "data.curriculum.retire_above": "prompts with a pass rate of at least 0.95 are retired",
    "env.agent.accept_request_rewards": "programs call endpoint.reward, commands write $ALPHAAPOLLO_RESULT",
    "env.agent.model_names": "the model is named policy",
    "env.agent.reward_weight": "scale the rewards in your program",
    "evolving.asks": "a role is asked up to three times",
    "evolving.finalists": "the solution with the largest share of votes is the answer",
    "evolving.max_failures": "a run stops after 20 failures in a row",
    "evolving.select": "the solution with the largest share of votes is the answer",
    "preference.reference": "the reference's log-probs are computed once, before the first step",
    "roles.referee": "the solution with the largest share of votes is the answer",
    "roles.verifier_of_verifiers": "raise evolving.votes for reliable votes",
}
"""Removed key or section -> its replacement, or what always happens. Saved configurations may contain it."""
RENAMED_PRESETS = {"algorithm=trpo_dual": "algorithm=reference_kl_dual"}
"""Old preset -> new preset. Saved configurations have the keys of a preset, not its name."""


def describe_rename(name: str) -> str:
    """Return `renamed to trainer.seed` or `removed: ...`; "" if the key was neither renamed nor removed."""
    if removed := next((reason for old, reason in REMOVED_KEYS.items() if f"{name}.".startswith(f"{old}.")), ""):
        return f"removed: {removed}"
    new = name
    for old, replacement in RENAMED_KEYS.items():
        if f"{new}.".startswith(f"{old}."):
            new = replacement + new.removeprefix(old)
    return f"renamed to {new}" if new != name else ""


def move_renamed_keys(values: JsonObject) -> None:
    """Move the values of a saved configuration from old names to new names, and drop removed keys, in place."""
    for name in [*REMOVED_KEYS, *RENAMED_KEYS]:
        outer, _, last = name.rpartition(".")
        section = find_nested_map(values, outer)
        if last in section:
            value = section.pop(last)
            if name in RENAMED_KEYS:
                merge_maps(values, nest_value(RENAMED_KEYS[name], value))
