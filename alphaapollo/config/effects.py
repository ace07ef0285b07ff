"""Find keys that have no effect, and keys that need others, by the markers of the schema (schema/base.py)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from alphaapollo.config.keys import Key, find_key_rule, format_value, get_field_markers, get_value, list_keys
from alphaapollo.config.schema.base import ActiveWhen, Device, Requires, Section


def describe_ineffective_keys(config: Section, keys_with_reasons: Iterable[tuple[str, str]]) -> list[str]:
    """Return a warning for each (key without effect, reason), unless its value is the default or disables a feature."""
    keys = list_keys(type(config))
    lines = []
    for name, reason in keys_with_reasons:
        value = get_value(config, name)
        is_silent = any(marker.silent_value == value for _, marker in get_field_markers(keys[name], ActiveWhen))
        if value != keys[name].default and not is_silent:
            lines.append(f"{name}={format_value(value)} has no effect: {reason}.")
    return lines


def find_inactive_keys(config: Section, device: Device | None = None) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) for every key that has no effect, given the command and the other values.

    device: Device of the run; None = keys that need a particular device are not reported.
    """
    for key in list_keys(type(config)).values():
        if reason := find_key_rule(config.unread_keys, key) or explain_inactive_key(config, key, device):
            yield key.name, reason


def explain_inactive_key(config: Section, key: Key, device: Device | None = None) -> str | None:
    """Return why the key has no effect: its first ActiveWhen condition that is not met; None if all are met."""
    for section, marker in get_field_markers(key, ActiveWhen):
        try:
            value = device if marker.key == "@device" else get_value(config, resolve_relative_key(section, marker.key))
        except AttributeError:  # a key that this command does not have
            continue
        if (marker.key == "@device" and device is None) or marker.is_met(value):
            continue
        if marker.reason:
            return marker.reason
        shown = resolve_relative_key(section, marker.shown_key)
        shown_value = get_value(config, shown)
        return f"{shown} is {'empty' if shown_value in ('', [], {}) else format_value(shown_value)}"
    return None


def find_unmet_requirements(config: Section) -> Iterator[str]:
    """Yield an error for each key with an effect whose Requires markers are not met."""
    for key in list_keys(type(config)).values():
        value, unread = get_value(config, key.name), find_key_rule(config.unread_keys, key)
        for section, rule in get_field_markers(key, Requires):
            try:
                found = get_value(config, resolve_relative_key(section, rule.condition.key))
            except AttributeError:  # a key that this command does not have
                continue
            is_used = not unread and (value != key.default if rule.when is ... else value == rule.when)
            if is_used and not rule.condition.is_met(found) and explain_inactive_key(config, key) is None:
                needed = resolve_relative_key(section, rule.condition.shown_key)
                yield _describe_unmet_requirement(key, value, needed, found, rule)


def _describe_unmet_requirement(key: Key, value: object, needed: str, found: object, rule: Requires) -> str:
    """Return an error such as `lora=adapter needs name=vllm, got name=hf. Set name=vllm, or lora=merged.`"""
    values = rule.condition.values or ((True,) if found is False else ())
    choice = f"{needed}={format_value(values[0])}" if values else needed
    choice = choice if rule.condition.expected else f"another {needed}"
    fix = rule.fix or f"{choice}, or {key.name}={format_value(key.default)}"
    return f"{key.name}={format_value(value)} needs {choice}, got {needed}={format_value(found)}. Set {fix}."


def resolve_relative_key(section_prefix: str, relative_key: str) -> str:
    """Return the full dotted key: `type` relative to the section `algorithm.` is `algorithm.type`; `/a.b` is `a.b`."""
    return relative_key[1:] if relative_key.startswith("/") else section_prefix + relative_key
