"""Checkpoints of a user's loop: their names, and the values of the user in them (state.json)."""

from __future__ import annotations

import json
import re
from pathlib import Path

from alphaapollo.runs.checkpoint_folder import find_damage
from alphaapollo.utils.disk import MAX_JSON, read_json
from alphaapollo.utils.json_types import JsonObject

STATE = "state.json"
STEP_NAME = re.compile(r"step_(\d+)")


def find_checkpoint(folder: Path, name: str | Path) -> Path:
    """Return a checkpoint in `folder` by name, or any checkpoint by path. Raises ValueError if it is missing or
    damaged."""
    matched = STEP_NAME.fullmatch(str(name))
    named = folder / (f"step_{int(matched[1]):06d}" if matched else name)
    path = named if named.is_dir() else Path(name).expanduser()
    if damage := find_damage(path):
        known = ", ".join(sorted(other.name for other in named.parent.glob("[!.]*"))) or "none"
        raise ValueError(f"{path} cannot be loaded: {damage[0]}. Checkpoints of this run: {known}.")
    return path


def format_state(state: JsonObject) -> str:
    """Format `t.state` as JSON, with inf and nan as Python writes them. Raises ValueError for values that JSON would
    change, e.g. tuples."""
    _check_value(state, "t.state")
    text = json.dumps(state)
    if len(text) > MAX_JSON:
        raise ValueError(f"t.state has {len(text) >> 20} MiB, more than {MAX_JSON >> 20}. Keep large values in files.")
    return text


def read_state(checkpoint: Path) -> JsonObject:
    """Read `t.state` from a checkpoint; empty if it has none, e.g. a checkpoint of main_ppo."""
    file = checkpoint / STATE
    state: JsonObject = read_json(file) if file.is_file() else {}
    return state


def _check_value(value: object, place: str) -> None:
    if isinstance(value, dict):
        if wrong := [key for key in value if not isinstance(key, str)]:
            raise ValueError(f"{place} has the key {wrong[0]!r}, but keys must be texts. Use {str(wrong[0])!r}.")
        for key, item in value.items():
            _check_value(item, f"{place}[{key!r}]")
    elif isinstance(value, list):
        for number, item in enumerate(value):
            _check_value(item, f"{place}[{number}]")
    elif not (value is None or isinstance(value, str | int | float)):
        raise ValueError(
            f"{place} is a {type(value).__name__}, which a checkpoint cannot contain. Use numbers, texts, True, False, "
            "None, lists and dicts, e.g. list(value), float(value) or value.tolist()."
        )
