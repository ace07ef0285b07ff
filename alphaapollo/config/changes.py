"""Differences between the configuration of a run and that of its resume, judged by the OnResume rules."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from alphaapollo.config.effects import resolve_key
from alphaapollo.config.keys import COMMANDS, Key, format_value, get_markers, get_value, list_keys
from alphaapollo.config.schema.base import ONLY_AT_START, FilePath, OnResume, Section, Verdict, apply_on_resume


@dataclass(frozen=True)
class Change:
    """A key with another value."""

    key: str
    old: Any
    new: Any
    verdict: Verdict
    why: str = ""

    def __str__(self) -> str:
        """`trainer.seed: 0 -> 1: applied`"""
        why = f" ({self.why})" if self.why else ""
        return f"{self.key}: {format_value(self.old)} -> {format_value(self.new)}: {self.verdict}{why}"


def find_changes(saved: Mapping[str, Any], config: Section) -> list[Change]:
    """Every key of `config` with another value than in `saved`, the plain values of a config.yaml.

    A key that `saved` lacks had its default; a key that only `saved` has is ignored: another version wrote it.
    """
    now, defaults = config.model_dump(mode="json"), type(config)().model_dump(mode="json")
    found = []
    for key in list_keys(type(config)).values():
        rule = find_resume_rule(config, key)
        new = _look_up(now, key.name, None)
        old = _look_up(saved, key.name, _look_up(defaults, key.name, None))
        if rule.verdict != "ignored" and _normalize_paths(key, old) != _normalize_paths(key, new):
            found.append(Change(key.name, old, new, rule.verdict, rule.why))
    return found


def find_resume_rule(config: Section, key: Key) -> OnResume:
    """What happens when a run resumes with another value of the key."""
    if any(rule.verdict == "ignored" for _, rule in get_markers(key, OnResume)):
        return ONLY_AT_START
    parts = key.name.split(".")
    for length in range(len(parts), -1, -1):
        if (rule := config.on_resume.get(".".join(parts[:length]))) is not None:
            return rule
    for section, rule in reversed(get_markers(key, OnResume)):
        is_met = rule.when is None or rule.when.is_met(get_value(config, resolve_key(section, rule.when.key)))
        return rule if is_met else apply_on_resume()
    return apply_on_resume()


def find_command(saved: Mapping[str, Any]) -> str | None:
    """The command that wrote a configuration, by its sections: `main_sft`; None = another version's."""
    return next((name for name, schema in COMMANDS.items() if schema.model_fields.keys() == saved.keys()), None)


def _look_up(values: Any, key: str, default: Any) -> Any:
    for part in key.split("."):
        if not isinstance(values, Mapping) or part not in values:
            return default
        values = values[part]
    return values


def _normalize_paths(key: Key, value: Any) -> Any:
    """Different spellings of the same files are equal: `./a.parquet`, `[a.parquet]`."""
    if not value or not get_markers(key, FilePath):
        return value
    return [os.path.abspath(os.path.expanduser(one)) for one in (value if isinstance(value, list) else [value])]
