"""Find keys that are set but have no effect, by the ActiveWhen markers of the schema (schema/base.py)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from alphaapollo.config.keys import Key, format_value, get_field_markers, get_value, list_keys
from alphaapollo.config.schema.base import ActiveWhen, Device, Section


def describe_ineffective_keys(config: Section, reasons: Iterable[tuple[str, str]]) -> list[str]:
    """Return one line for each (key, reason) whose value is not the default and not the marker's silent value."""
    keys = list_keys(type(config))
    lines = []
    for name, reason in reasons:
        value = get_value(config, name)
        is_silent = any(marker.silent_value == value for _, marker in get_field_markers(keys[name], ActiveWhen))
        if value != keys[name].default and not is_silent:
            lines.append(f"{name}={format_value(value)} has no effect: {reason}.")
    return lines


def find_inactive_keys(config: Section, device: Device | None = None) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) for every key that the other values of the configuration make inactive.

    device: Device of the run; None = keys that need a particular device are not reported.
    """
    for key in list_keys(type(config)).values():
        if reason := _find_unread_reason(config, key) or explain_inactive(config, key, device):
            yield key.name, reason


def explain_inactive(config: Section, key: Key, device: Device | None = None) -> str | None:
    """Return the first condition of the key that is not met; None if all conditions are met."""
    for section, marker in get_field_markers(key, ActiveWhen):
        try:
            value = device if marker.key == "@device" else get_value(config, resolve_key(section, marker.key))
        except AttributeError:  # a key that this command does not have
            continue
        if (marker.key == "@device" and device is None) or marker.is_met(value):
            continue
        shown = resolve_key(section, marker.shown_key)
        return marker.reason or f"{shown} is {_format_shown_value(get_value(config, shown))}"
    return None


def _find_unread_reason(config: Section, key: Key) -> str | None:
    parts = key.name.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((config.unread[prefix] for prefix in prefixes if prefix in config.unread), None)


def resolve_key(section: str, key: str) -> str:
    """Return the full dotted key of a marker's key. section: prefix of the declaring section, e.g. `algorithm.`"""
    return key[1:] if key.startswith("/") else section + key


def _format_shown_value(value: object) -> str:
    return "empty" if value in ("", [], {}) else format_value(value)
