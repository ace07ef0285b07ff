"""Check a configuration against the markers of the schema, the file system and the machine, without importing torch or
starting workers."""

from __future__ import annotations

import glob
import os
import pkgutil
from collections.abc import Iterable, Iterator, Set
from pathlib import Path

from pydantic import BaseModel

from alphaapollo.config.errors import ConfigError
from alphaapollo.config.keys import (
    Key,
    find_key_rule,
    format_value,
    get_field_markers,
    get_value,
    list_all_keys,
)
from alphaapollo.config.requirements import UNKNOWN_CORES, CheckContext, find_conflicts, list_requirements
from alphaapollo.config.resolve import resolve_device
from alphaapollo.config.schema import Config
from alphaapollo.config.schema.base import ActiveWhen, Device, FilePath, RegisteredName, Requires, Section
from alphaapollo.config.schema.trainer import RunSettings
from alphaapollo.config.verl import find_values_meant_for_verl
from alphaapollo.utils.hub import DatasetEntry, explain_gguf_file, explain_model_folder, is_local_path


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
    table, paths = list_requirements(config), find_path_errors(config, optional_paths)
    if found := [*paths, *extra_errors, *find_conflicts(context, table=table)]:
        raise ConfigError(found)
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
        elif (found := _find_other_value(config, section, marker)) and not marker.is_met(found[0]):
            empty = found[2] in ("", [], {})
            return marker.reason or f"{found[1]} is {'empty' if empty else format_value(found[2])}"
    return None


def _find_other_value(config: Section, section: str, marker: ActiveWhen) -> tuple[object, str, object] | None:
    """Return a marker's value, and the key to show with its value; None if the command has no such key."""
    names = [name[1:] if name[0] == "/" else section + name for name in (marker.key, marker.shown_key)]
    try:
        value = get_value(config, names[0])
    except AttributeError:
        return None
    return value, names[1], value if " " in names[1] else get_value(config, names[1])


def find_unmet_requirements(config: Section) -> Iterator[str]:
    """Yield an error for each key with an effect whose Requires markers are not met."""
    for key in list_all_keys(config).values():
        value, unread = get_value(config, key.name), find_key_rule(config.unread_keys, key)
        for section, rule in get_field_markers(key, Requires):
            is_used = not unread and (value != key.default if rule.when is ... else value == rule.when)
            found = _find_other_value(config, section, rule.condition) if is_used else None
            if found and not rule.condition.is_met(found[0]) and explain_inactive_key(config, key) is None:
                other, needed, got = found
                values = rule.condition.values or ((True,) if other is False else ())
                choice = f"{needed}={format_value(values[0])}" if values else needed
                choice = choice if rule.condition.expected else f"another {needed}"
                fix = rule.fix or f"{choice}, or {key.name}={format_value(key.default)}"
                yield (f"{key.name}={format_value(value)} needs {choice}, got {needed}={format_value(got)}. Set {fix}.")


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
        for _, path in get_field_markers(key, FilePath):
            value = get_value(config, key.name)
            is_active = explain_inactive_key(config, key) is None
            if not value and path.required and is_active and key.name not in optional_paths:
                yield f"{key.name} is required, but it is empty. Set {key.name}=..."
            elif is_active or path.kind != "folder":
                files = value if isinstance(value, list) else [str(value)]
                yield from (f"{key.name}: {error}" for file in files if (error := _find_path_error(path, file)))


def list_model_paths(config: BaseModel) -> Iterator[tuple[str, str]]:
    """Yield (key, path) of each model, also of those in maps of models."""
    for key in list_all_keys(config).values():
        if any(path.kind == "model" for _, path in get_field_markers(key, FilePath)):
            yield key.name, str(get_value(config, key.name))


def _find_path_error(marker: FilePath, path: str) -> str:
    """Return an error such as `no such file: a.parquet ...` if `path` cannot be used as its marker says, else ""."""
    path_kind = marker.kind
    if marker.may_be_url and "://" in path:
        return ""
    local = os.path.expanduser(path)  # os.path returns false for names that are too long; pathlib raises
    is_folder = os.path.isdir(local)
    if not path or {"unchecked": True, "code": os.path.isfile(local), "folder": is_folder}.get(path_kind):
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
    noun = "folder" if path_kind in ("folder", "model") else "file"
    return f"no such {noun}: {path} (searched in {Path.cwd()}). Set another path."
