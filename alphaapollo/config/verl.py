"""verl's keys that are renamed, dropped or not supported here, or have another meaning (verl_keys.yaml)."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cache
from importlib import resources
from typing import Any

import yaml
from pydantic import BaseModel

from alphaapollo.config.keys import COMMANDS, format_value, sections

Tables = dict[str, dict[str, Any]]


@cache
def verl_tables() -> dict[str, Tables]:
    """verl_keys.yaml: command -> table -> its entries, which the file describes."""
    text = resources.files("alphaapollo.config").joinpath("verl_keys.yaml").read_text(encoding="utf-8")
    found: dict[str, Tables] = yaml.safe_load(text)
    return found


@cache
def verl_keys() -> dict[str, dict[str, str]]:
    """Keys that are not accepted: command -> key, or pattern with `*` -> `renamed to ...` and the like."""
    return {command: _verdicts(tables) for command, tables in verl_tables().items()}


def _verdicts(tables: Tables) -> dict[str, str]:
    renamed = {key: f"renamed to {new}" for key, new in tables["renamed"].items()}
    dropped = {key: f"dropped because {reason}" for reason, keys in tables["dropped"].items() for key in keys}
    missing = {key: f"not supported ({reason})" for reason, keys in tables["not_supported"].items() for key in keys}
    return renamed | dropped | missing


def verl_verdict(name: str, *schemas: type[BaseModel]) -> str | None:
    """Verdict on a key of verl, None if it is not verl's: from its own entry, or from the longest pattern that matches.

    Of several schemas, those with the section of the key come first.
    """
    found: list[tuple[bool, bool, int, str]] = []
    for schema in schemas:
        has_section = name.split(".")[0] in sections(schema)
        for pattern, verdict in verl_keys()[_command(schema)].items():
            if fnmatchcase(name, pattern) or (pattern.endswith(".*") and fnmatchcase(name, pattern[:-2])):
                found.append(("*" not in pattern, has_section, len(pattern), verdict))
    return max(found)[3] if found else None


def _command(schema: type[BaseModel]) -> str:
    return next(command for command, known in COMMANDS.items() if known is schema)


def differences(schema: type[BaseModel]) -> dict[str, str]:
    """Accepted keys with another meaning or another default in verl: key -> the difference."""
    tables = verl_tables()[_command(schema)]
    meanings = tables.get("meaning", {})
    defaults = {key: f"verl's default is {format_value(value)}" for key, value in tables.get("default", {}).items()}
    return {
        key: "; ".join(text for text in (meanings.get(key), defaults.get(key)) if text)
        for key in sorted(meanings | defaults)
    }
