"""Check a configuration against the markers of the schema, the file system and the machine, without importing torch or
starting workers."""

from __future__ import annotations

import glob
import os
import pkgutil
from collections.abc import Iterable, Iterator, Set
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel

from alphaapollo.config.errors import ConfigError
from alphaapollo.config.keys import Key, find_key_rule, format_value, get_field_markers, get_value, list_all_keys
from alphaapollo.config.requirements import UNKNOWN_CORES, CheckContext, find_conflicts, list_requirements
from alphaapollo.config.resolve import resolve_device
from alphaapollo.config.schema import Config
from alphaapollo.config.schema.base import NOT_SET, ActiveWhen, Device, FilePath, RegisteredName, Requires, Section
from alphaapollo.config.schema.trainer import RunSettings
from alphaapollo.config.verl import find_values_meant_for_verl
from alphaapollo.utils.hub import DatasetEntry, explain_gguf_file, explain_model_folder, is_local_path
from alphaapollo.utils.user_module import find_module_file


def check_config_and_get_notices(
    config: Section,
    num_gpus: int = 0,
    num_cores: int = UNKNOWN_CORES,
    user_keys: Set[str] = frozenset(),
    extra_errors: Iterable[str] = (),
    extra_ineffective_keys: Iterable[tuple[str, str]] = (),
    optional_paths: Set[str] = frozenset(),
) -> list[str]:
    """Check paths and the machine, and return warnings about keys without effect and about likely mistakes.

    Args:
        num_gpus: GPUs of one node.
        num_cores: CPU cores of one node.
        user_keys: Keys that the user set. Keys with another meaning in verl cause a warning.
        extra_errors: Errors that the caller found, to report together with the errors found here.
        extra_ineffective_keys: (key, reason) for keys that the caller knows to have no effect.
        optional_paths: Keys of required paths that the caller does not need.

    Raises ConfigError with all errors if a file or folder is missing, or a size does not fit the machine.
    """
    trainer = getattr(config, "trainer", None)
    device = resolve_device(trainer.device, num_gpus) if isinstance(trainer, RunSettings) else None
    context = CheckContext(config, device, num_gpus, num_cores)
    table, path_errors = list_requirements(config), find_path_errors(config, optional_paths)
    if errors := [*path_errors, *extra_errors, *find_conflicts(context, table=table)]:
        raise ConfigError(errors)
    lines = describe_ineffective_keys(config, [*find_inactive_keys(config, device), *extra_ineffective_keys])
    lines += find_conflicts(context, is_error=False, table=table)
    return [*lines, *find_values_meant_for_verl(config, user_keys)] if isinstance(config, Config) else lines


def describe_ineffective_keys(config: Section, keys_with_reasons: Iterable[tuple[str, str]]) -> list[str]:
    """Return a warning for each (key without effect, reason), unless its value is the default or disables a feature."""
    keys = list_all_keys(config)
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
    for key in list_all_keys(config).values():
        if reason := find_key_rule(config.unread_keys, key) or explain_inactive_key(config, key, device):
            yield key.name, reason


def explain_inactive_key(config: Section, key: Key, device: Device | None = None) -> str | None:
    """Return why the key has no effect: its first ActiveWhen condition that is not met; None if all are met."""
    for section, marker in get_field_markers(key, ActiveWhen):
        if marker.key == "@device":
            if device is not None and not marker.is_met(device):
                return marker.reason
        elif (other := _find_other_key(config, section, marker)) and not marker.is_met(other.value):
            is_empty = other.shown_value in ("", [], {})
            return marker.reason or f"{other.shown} is {'empty' if is_empty else format_value(other.shown_value)}"
    return None


class _OtherKey(NamedTuple):
    value: object  # of the key that the condition names
    shown: str  # key that messages name instead, because users can set it; often the same key
    shown_value: object


def _find_other_key(config: Section, section: str, condition: ActiveWhen) -> _OtherKey | None:
    """Return the key that a condition names; None if the command has no such key."""
    names = (condition.key, condition.shown_key)
    key, shown = (name[1:] if name[0] == "/" else section + name for name in names)
    try:
        value = get_value(config, key)
    except AttributeError:
        return None
    return _OtherKey(value, shown, get_value(config, shown))


def find_unmet_requirements(config: Section) -> Iterator[str]:
    """Yield an error for each active key that has an unmet Requires marker."""
    read_keys = [key for key in list_all_keys(config).values() if not find_key_rule(config.unread_keys, key)]
    for key in read_keys:
        value = get_value(config, key.name)
        for section, rule in get_field_markers(key, Requires):
            condition = rule.condition
            is_used = value != key.default if rule.when is NOT_SET else value == rule.when
            other = _find_other_key(config, section, condition) if is_used else None
            if other and not condition.is_met(other.value) and explain_inactive_key(config, key) is None:
                needed_values = condition.values or ((True,) if other.value is False else ())
                needed = f"{other.shown}={format_value(needed_values[0])}" if needed_values else other.shown
                choice = needed if condition.expected else f"another {other.shown}"
                fix = rule.fix or f"{choice}, or {key.name}={format_value(key.default)}"
                got = f"{other.shown}={format_value(other.shown_value)}"
                yield f"{key.name}={format_value(value)} needs {choice}, got {got}. Set {fix}."


def find_unknown_names(config: BaseModel) -> Iterator[str]:
    """Yield an error for each name that is not registered, unless a file of the user may register it. Imports torch."""
    keys = list_all_keys(config).values()
    if any(key.name.endswith("custom_module") and get_value(config, key.name) for key in keys):
        return
    for key in keys:
        for _, registered in get_field_markers(key, RegisteredName):
            name = get_value(config, key.name)
            try:
                pkgutil.resolve_name(f"alphaapollo.{registered.find}")(name)
            except ValueError as error:
                yield f"{key.name}={name}: {error}"


def find_path_errors(config: Section, optional_paths: Set[str] = frozenset()) -> Iterator[str]:
    """Yield an error for each required path that is not set, and for each file or folder that does not exist."""
    for key in list_all_keys(config).values():
        for _, marker in get_field_markers(key, FilePath):
            value = get_value(config, key.name)
            is_active = explain_inactive_key(config, key) is None
            if not value and marker.required and is_active and key.name not in optional_paths:
                yield f"{key.name} is required, but it is empty. Set {key.name}=..."
            elif is_active or marker.kind != "folder":
                paths = value if isinstance(value, list) else [str(value)]
                yield from (f"{key.name}: {error}" for path in paths if (error := _find_path_error(marker, path)))


def list_model_paths(config: BaseModel) -> Iterator[tuple[str, str]]:
    """Yield (key, path) of each model, also of the models in maps."""
    for key in list_all_keys(config).values():
        if any(marker.kind == "model" for _, marker in get_field_markers(key, FilePath)):
            yield key.name, str(get_value(config, key.name))


def _find_path_error(marker: FilePath, path: str) -> str:
    """Return an error such as `no such file: a.parquet ...`; "" if `path` is what its marker requires."""
    path_kind = marker.kind
    if marker.may_be_url and "://" in path:
        return ""
    local = os.path.expanduser(path)  # os.path returns false for names that are too long; pathlib raises
    is_folder = os.path.isdir(local)
    if not path or {"unchecked": True, "code": os.path.isfile(local), "folder": is_folder}.get(path_kind):
        return ""
    if path_kind == "code" and find_module_file(path):
        return ""
    if path_kind == "data":
        if "://" in path:
            return f"{path} is an address. Set the path of a downloaded file, or OWNER/NAME of a data set on the hub."
        entry = DatasetEntry.parse(path)
        if any(map(os.path.exists, (local, os.path.expanduser(entry.path), *glob.glob(local)))) or entry.is_hub_id:
            return ""
    if path_kind == "model" and is_folder:
        return explain_model_folder(path)
    if path_kind == "model" and (error := explain_gguf_file(path)):
        return error
    if path_kind == "tokenizer" or (path_kind == "model" and not is_local_path(path)):
        return ""
    noun = {"folder": "folder", "model": "folder", "code": "file or installed module"}.get(path_kind, "file")
    return f"no such {noun}: {path} (searched in {Path.cwd()}). Set another path."
