"""Check a configuration against the file system and the machine, without importing torch or starting workers.

The schema checks types, bounds and combinations of values when a configuration is created. Checks that depend on
registered names (losses, environments, ...) are in trainer/setup/combinations.py and launch/input_checks.py.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator, Set
from pathlib import Path

from pydantic import BaseModel

from alphaapollo.config.effects import describe_ineffective_keys, explain_inactive_key, find_inactive_keys
from alphaapollo.config.errors import ConfigError
from alphaapollo.config.keys import get_field_markers, get_value, list_keys, list_sections
from alphaapollo.config.machine import find_machine_errors, find_machine_warnings
from alphaapollo.config.resolve import resolve_device
from alphaapollo.config.schema import Config, EvalConfig, EvolvingConfig, RunFolder
from alphaapollo.config.schema.base import FilePath, Section
from alphaapollo.config.verl import find_values_meant_for_verl
from alphaapollo.utils.hub import DatasetEntry, is_local_path


def check_config_and_get_notices(
    config: Section,
    num_gpus: int = 0,
    num_cores: int = 1,
    user_keys: Set[str] = frozenset(),
    extra_errors: Iterable[str] = (),
    extra_ineffective_keys: Iterable[tuple[str, str]] = (),
) -> list[str]:
    """Check paths and sizes, and return warnings about keys without effect and about likely mistakes.

    Args:
        num_gpus: GPUs of one node.
        num_cores: CPU cores of one node.
        user_keys: Keys that the user set. Keys with another meaning in verl cause a warning.
        extra_errors: Errors that the caller found, to report together with the errors found here.
        extra_ineffective_keys: (key, reason) for keys that the caller knows to have no effect.

    Raises ConfigError with all errors if a file or folder is missing, or a size does not fit the machine.
    """
    trainer = getattr(config, "trainer", None)
    device = None if trainer is None or isinstance(config, EvalConfig) else resolve_device(trainer.device, num_gpus)
    found = [*find_path_errors(config), *extra_errors]
    if device is not None:
        found += find_machine_errors(config, device, num_gpus, num_cores)
    if found:
        raise ConfigError(found)
    lines = describe_ineffective_keys(config, [*find_inactive_keys(config, device), *extra_ineffective_keys])
    lines += collect_section_warnings(config)
    if device is not None:
        lines += find_machine_warnings(config, device, num_cores)
    return [*lines, *find_values_meant_for_verl(config, user_keys)] if isinstance(config, Config) else lines


def collect_section_warnings(config: Section) -> Iterator[str]:
    """Yield the warnings of the configuration and of each of its sections, with complete dotted keys."""
    yield from config.find_warnings()
    for name in list_sections(type(config)):
        section = get_value(config, name)
        if isinstance(section, Section):
            yield from (f"{name}.{line}" for line in section.find_warnings())


def find_path_errors(config: Section) -> Iterator[str]:
    """Yield an error for each required path that is not set, and for each file or folder that does not exist."""
    for key in list_keys(type(config)).values():
        for _, path in get_field_markers(key, FilePath):
            value = get_value(config, key.name)
            is_active = explain_inactive_key(config, key) is None
            if not value and path.required and is_active:
                yield f"{key.name} is required, but it is empty. Set {key.name}=..."
            elif is_active or path.kind != "folder":
                files = value if isinstance(value, list) else [str(value)]
                yield from (f"{key.name}: {error}" for file in files if (error := _find_path_error(path.kind, file)))
    keys = list_keys(type(config))
    for name, model_path in list_model_paths(config):
        if name not in keys and (error := _find_path_error("model", model_path)):
            yield f"{name}: {error}"
    if isinstance(config, EvolvingConfig) and not config.models:
        yield "models is required, but it is empty. Set models.policy.path=MODEL, or base_url and name."
    if isinstance(config, Config) and not config.validates_on_rows:
        patience = config.algorithm.reference_reset.patience
        if patience is not None:
            yield f"algorithm.reference_reset.patience={patience} needs data.val_files and trainer.test_freq. Set both."
    if isinstance(trainer := getattr(config, "trainer", None), RunFolder):
        yield from _find_run_folder_errors(trainer)


def list_model_paths(config: BaseModel) -> Iterator[tuple[str, str]]:
    """Yield (key, path) of each model, also of those in maps such as teacher.models."""
    for key in list_keys(type(config)).values():
        if any(path.kind == "model" for _, path in get_field_markers(key, FilePath)):
            yield key.name, str(get_value(config, key.name))
    teachers = config.teacher.models if isinstance(config, Config) else {}
    served = config.models if isinstance(config, EvolvingConfig) else {}
    yield from ((f"teacher.models.{name}.path", model.path) for name, model in teachers.items())
    yield from ((f"models.{name}.path", model.path) for name, model in served.items())


def _find_path_error(path_kind: str, path: str) -> str:
    """Return an error such as `no such file: a.parquet ...` if `path` cannot be used as `path_kind`, else ""."""
    local = os.path.expanduser(path)  # os.path returns false for names that are too long; pathlib raises
    is_folder = os.path.isdir(local)
    if not path or (path_kind == "code" and os.path.isfile(local)) or (path_kind == "folder" and is_folder):
        return ""
    if path_kind == "data":
        entry = DatasetEntry.parse(path)
        if any(map(os.path.exists, (local, os.path.expanduser(entry.path), *glob.glob(local)))) or entry.is_hub_id:
            return ""
    if path_kind == "model" and is_folder:
        is_model = os.path.isfile(os.path.join(local, "config.json"))
        return "" if is_model else f"{path} has no config.json. Set the folder of a Hugging Face model, or a hub id."
    if path_kind == "tokenizer" or (path_kind == "model" and not is_local_path(path)):
        return ""
    noun = "folder" if path_kind in ("folder", "model") else "file"
    fix = "Set another folder, or a hub id OWNER/NAME." if path_kind == "model" else "Set another path."
    return f"no such {noun}: {path} (searched in {Path.cwd()}). {fix}"


def _find_run_folder_errors(trainer: RunFolder) -> Iterator[str]:
    folder = trainer.folder.absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir():
        yield f"the run's folder is {trainer.folder}, but {existing} is a file. Set another trainer.output_dir or name."
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield f"the run's folder is {trainer.folder}, but {existing} is not writable. Set another trainer.output_dir."
