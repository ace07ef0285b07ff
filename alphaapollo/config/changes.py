"""Compare a run's saved configuration with the configuration of its resume, and apply the schema's ResumeRule rules."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from alphaapollo.config.keys import (
    COMMANDS,
    Key,
    find_key_rule,
    find_nested_map,
    format_value,
    get_field_markers,
    get_value,
    list_all_keys,
)
from alphaapollo.config.schema.base import ONLY_AT_START, FilePath, ResumeRule, Section, Verdict
from alphaapollo.config.schema.plugins import PluginSections
from alphaapollo.utils.json_types import Json


@dataclass(frozen=True)
class ConfigChange:
    """Key whose value differs between the start and the resume of a run, with the verdict of its ResumeRule rule."""

    key: str
    old: object
    new: object
    verdict: Verdict
    reason: str = ""

    def __str__(self) -> str:
        """Format the change as `trainer.seed: 0 -> 1: applied`."""
        reason = f" ({self.reason})" if self.reason else ""
        return f"{self.key}: {format_value(self.old)} -> {format_value(self.new)}: {self.verdict}{reason}"


def find_changes(saved_config: Mapping[str, object], config: Section) -> list[ConfigChange]:
    """Return the keys whose value in `config` differs from the parsed config.yaml of the earlier run.

    A key that is missing in `saved_config` counts as its default. A key that the schema does not have is ignored,
    because another version of this package wrote it.
    """
    now, defaults = config.model_dump(mode="json"), type(config)().model_dump(mode="json")
    found = []
    for key in list_all_keys(config).values():
        rule = find_resume_rule(config, key)
        outer, _, last = key.name.rpartition(".")
        new: Json = find_nested_map(now, outer).get(last)
        default = find_nested_map(defaults, outer).get(last, key.default)
        old: Json = find_nested_map(saved_config, outer).get(last, default)
        if get_field_markers(key, PluginSections) and old.keys() <= new.keys():
            continue  # list_all_keys also has the keys of these sections, which are compared one by one
        if rule.verdict != "ignored" and _make_paths_absolute(key, old) != _make_paths_absolute(key, new):
            found.append(ConfigChange(key.name, old, new, rule.verdict, rule.reason))
    return found


def find_resume_rule(config: Section, key: Key) -> ResumeRule:
    """Return the rule that decides what happens if a run resumes with another value of the key."""
    rules = get_field_markers(key, ResumeRule)
    if any(rule.verdict == "ignored" for _, rule in rules):
        return ONLY_AT_START
    if (command_rule := find_key_rule(config.resume_rules, key)) is not None:
        return command_rule
    section, innermost = rules[-1] if rules else ("", ResumeRule("applied"))
    applies = innermost.when is None or innermost.when.is_met(get_value(config, section + innermost.when.key))
    return innermost if applies else ResumeRule("applied")


def identify_command(saved_config: Mapping[str, object]) -> str | None:
    """Return the command, e.g. `main_sft`, whose configuration has the same sections as a parsed config.yaml."""
    return next((name for name, schema in COMMANDS.items() if schema.model_fields.keys() == saved_config.keys()), None)


def _make_paths_absolute(key: Key, value: Json) -> object:
    """Return the value of a path key as a list of absolute paths, so that `./a.parquet` equals `[a.parquet]`."""
    if not value or not get_field_markers(key, FilePath):
        return value
    return [os.path.abspath(os.path.expanduser(path)) for path in (value if isinstance(value, list) else [value])]
