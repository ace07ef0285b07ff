"""Differences between the configuration of a run and that of its resume, judged by the OnResume rules."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from alphaapollo.config.effects import resolve_key
from alphaapollo.config.keys import COMMANDS, Key, format_value, get_field_markers, get_value, list_keys
from alphaapollo.config.schema.base import ONLY_AT_START, FilePath, OnResume, Section, Verdict, apply_on_resume


@dataclass(frozen=True)
class Change:
    """Changed key of a resumed run."""

    key: str
    old: Any
    new: Any
    verdict: Verdict
    reason: str = ""

    def __str__(self) -> str:
        """`trainer.seed: 0 -> 1: applied`"""
        reason = f" ({self.reason})" if self.reason else ""
        return f"{self.key}: {format_value(self.old)} -> {format_value(self.new)}: {self.verdict}{reason}"


def find_changes(saved: Mapping[str, Any], config: Section) -> list[Change]:
    """Return the keys whose value in `config` differs from `saved`, the parsed config.yaml of the earlier run.

    A key that is missing in `saved` counts as its default. A key that is only in `saved` is ignored, because another
    version wrote it.
    """
    now, defaults = config.model_dump(mode="json"), type(config)().model_dump(mode="json")
    found = []
    for key in list_keys(type(config)).values():
        rule = find_resume_rule(config, key)
        new = _look_up(now, key.name, None)
        old = _look_up(saved, key.name, _look_up(defaults, key.name, None))
        if rule.verdict != "ignored" and _normalize_paths(key, old) != _normalize_paths(key, new):
            found.append(Change(key.name, old, new, rule.verdict, rule.reason))
    return found


def find_resume_rule(config: Section, key: Key) -> OnResume:
    """Return the rule for a run that resumes with another value of the key."""
    if any(rule.verdict == "ignored" for _, rule in get_field_markers(key, OnResume)):
        return ONLY_AT_START
    parts = key.name.split(".")
    for length in range(len(parts), -1, -1):
        if (rule := config.on_resume.get(".".join(parts[:length]))) is not None:
            return rule
    for section, rule in reversed(get_field_markers(key, OnResume)):
        is_met = rule.when is None or rule.when.is_met(get_value(config, resolve_key(section, rule.when.key)))
        return rule if is_met else apply_on_resume()
    return apply_on_resume()


def find_command(saved: Mapping[str, Any]) -> str | None:
    """Return the command that wrote a configuration, e.g. `main_sft`; None = its sections match no command."""
    return next((name for name, schema in COMMANDS.items() if schema.model_fields.keys() == saved.keys()), None)


def _look_up(values: Any, key: str, default: Any) -> Any:
    for part in key.split("."):
        if not isinstance(values, Mapping) or part not in values:
            return default
        values = values[part]
    return values


def _normalize_paths(key: Key, value: Any) -> Any:
    """Return the value with absolute paths, so that `./a.parquet` and `[a.parquet]` compare equal."""
    if not value or not get_field_markers(key, FilePath):
        return value
    return [os.path.abspath(os.path.expanduser(path)) for path in (value if isinstance(value, list) else [value])]
