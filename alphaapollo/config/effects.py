"""Find keys that are set but have no effect, by the ActiveWhen markers of the schema (schema/base.py)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from alphaapollo.config.keys import Key, find_key_rule, format_value, get_field_markers, get_value, list_keys
from alphaapollo.config.schema.base import ActiveWhen, Device, Section


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


def resolve_relative_key(section_prefix: str, relative_key: str) -> str:
    """Return the full dotted key: `type` relative to the section `algorithm.` is `algorithm.type`; `/a.b` is `a.b`."""
    return relative_key[1:] if relative_key.startswith("/") else section_prefix + relative_key
