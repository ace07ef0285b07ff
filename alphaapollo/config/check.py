"""Check a configuration against the file system and the machine, without heavy libraries and workers.

The schema checks types, bounds and combinations of values when a configuration is created. Checks that depend on
registered names are in trainer/setup/combinations.py and launch/input_checks.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Set
from pathlib import Path

from alphaapollo.config.effects import inactive_keys, report_ineffective, why_inactive
from alphaapollo.config.errors import ConfigError
from alphaapollo.config.keys import accepted_keys, rules_of, sections, value_of
from alphaapollo.config.machine import machine_problems, machine_warnings
from alphaapollo.config.resolve import resolve_device
from alphaapollo.config.schema import Config, EvalConfig, EvolvingConfig, RunFolder
from alphaapollo.config.schema.base import FilePath, Section
from alphaapollo.config.verl import verl_notices
from alphaapollo.utils.hub import is_local_path


def check(
    config: Section,
    num_gpus: int = 0,
    num_cores: int = 1,
    given: Set[str] = frozenset(),
    problems: Iterable[str] = (),
    ineffective: Iterable[tuple[str, str]] = (),
) -> list[str]:
    """Lines about keys without effect and about surprising settings.

    Args:
        num_gpus, num_cores: of one node.
        given: keys that the user set, for those with another meaning in verl.
        problems: further problems, found by the caller.
        ineffective: further keys without effect, with the reason.

    Raises:
        ConfigError: naming every problem of files, folders and sizes.
    """
    trainer = getattr(config, "trainer", None)
    device = None if trainer is None or isinstance(config, EvalConfig) else resolve_device(trainer.device, num_gpus)
    found = [*path_problems(config), *problems]
    if device is not None:
        found += machine_problems(config, device, num_gpus, num_cores)
    if found:
        raise ConfigError(found)
    lines = report_ineffective(config, [*inactive_keys(config, device), *ineffective])
    lines += section_warnings(config)
    if device is not None:
        lines += machine_warnings(config, device, num_cores)
    return [*lines, *verl_notices(config, given)] if isinstance(config, Config) else lines


def section_warnings(config: Section) -> Iterator[str]:
    """`Section.warnings` of the configuration and of its sections, with full keys."""
    yield from config.warnings()
    for name in sections(type(config)):
        section = value_of(config, name)
        if isinstance(section, Section):
            yield from (f"{name}.{line}" for line in section.warnings())


def path_problems(config: Section) -> Iterator[str]:
    """Required paths that are missing, and files and folders that do not exist."""
    for key in accepted_keys(type(config)).values():
        for _, path in rules_of(key, FilePath):
            value = value_of(config, key.name)
            is_active = why_inactive(config, key) is None
            if not value and path.required and is_active:
                yield f"{key.name}: required, got nothing. Set {key.name}=..."
            elif is_active or path.kind != "folder":
                files = value if isinstance(value, list) else [str(value)]
                yield from (f"{key.name}: {problem}" for file in files if (problem := _path_problem(path.kind, file)))
    if isinstance(config, EvolvingConfig):
        for name, model in config.models.items():
            if problem := _path_problem("model", model.path):
                yield f"models.{name}.path: {problem}"
        if not config.models:
            yield "models: required, got none. Set models.policy.path=MODEL, or base_url and name of a server's model."
    if isinstance(config, Config) and not (config.data.val_files and config.trainer.test_freq > 0):
        patience = config.algorithm.reference_reset.patience
        if patience is not None:
            yield f"algorithm.reference_reset.patience={patience} needs data.val_files and trainer.test_freq. Set both."
    if isinstance(trainer := getattr(config, "trainer", None), RunFolder):
        yield from _run_folder_problems(trainer)


def _path_problem(kind: str, path: str) -> str:
    """What is wrong with one path; empty: nothing."""
    local = os.path.expanduser(path)  # os.path returns false for names that are too long; pathlib raises
    is_folder = os.path.isdir(local)
    if not path or (kind in ("data", "code") and os.path.isfile(local)) or (kind == "folder" and is_folder):
        return ""
    if kind == "model" and is_folder:
        is_model = os.path.isfile(os.path.join(local, "config.json"))
        return "" if is_model else f"{path} has no config.json. Set the folder of a Hugging Face model, or a hub id."
    if kind == "tokenizer" or (kind == "model" and not is_local_path(path)):
        return ""
    what = "folder" if kind in ("folder", "model") else "file"
    fix = "Set another folder, or a hub id OWNER/NAME." if kind == "model" else "Set another path."
    return f"no such {what}: {path} (searched in {Path.cwd()}). {fix}"


def _run_folder_problems(trainer: RunFolder) -> Iterator[str]:
    folder = trainer.folder.absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir():
        yield f"the run's folder is {trainer.folder}, but {existing} is a file. Set another trainer.output_dir or name."
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield f"the run's folder is {trainer.folder}, but {existing} is not writable. Set another trainer.output_dir."
