"""Keys that are set but have no effect in a run, by the ActiveWhen markers of the schema (schema/base.py)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from alphaapollo.config.keys import Key, accepted_keys, format_value, rules_of, value_of
from alphaapollo.config.schema.base import ActiveWhen, Device, Section


def report_ineffective(config: Section, reasons: Iterable[tuple[str, str]]) -> list[str]:
    """One line for each (key, reason) where the value is not the default and requests something."""
    keys = accepted_keys(type(config))
    lines = []
    for name, because in reasons:
        value = value_of(config, name)
        requests_nothing = any(marker.quiet == value for _, marker in rules_of(keys[name], ActiveWhen))
        if value != keys[name].default and not requests_nothing:
            lines.append(f"{name}={format_value(value)} has no effect: {because}.")
    return lines


def inactive_keys(config: Section, device: Device | None = None) -> Iterator[tuple[str, str]]:
    """(key, reason) of every key that the configuration itself makes inactive.

    device: device of the run, for keys of one device; None = such keys are not reported.
    """
    for key in accepted_keys(type(config)).values():
        if because := _unread(config, key) or why_inactive(config, key, device):
            yield key.name, because


def why_inactive(config: Section, key: Key, device: Device | None = None) -> str | None:
    """Describe the first condition of the key that is not met; None if all are."""
    for section, marker in rules_of(key, ActiveWhen):
        try:
            value = device if marker.key == "@device" else value_of(config, full_name(section, marker.key))
        except AttributeError:  # a key that this command does not have
            continue
        if (marker.key == "@device" and device is None) or marker.is_met(value):
            continue
        shown = full_name(section, marker.shown)
        return marker.because or f"{shown} is {_to_words(value_of(config, shown))}"
    return None


def _unread(config: Section, key: Key) -> str | None:
    parts = key.name.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((config.unread[prefix] for prefix in prefixes if prefix in config.unread), None)


def full_name(section: str, key: str) -> str:
    """The dotted key of a marker's key; section: prefix of the section that declares it (`algorithm.`)."""
    return key[1:] if key.startswith("/") else section + key


def _to_words(value: object) -> str:
    return "empty" if value in ("", [], {}) else format_value(value)
