"""Load the configuration of a command from its arguments and YAML files.

schema defaults -> shipped or user's YAML -> presets (algorithm=dapo) -> key=value     merged as nested maps
                                                             |
                                   strict conversion to the schema's classes (pydantic)
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf._utils import get_yaml_loader  # reads 1e-6 as a number, unlike PyYAML's loader
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel

from alphaapollo.config.build import build_config
from alphaapollo.config.errors import ConfigError
from alphaapollo.config.key_tables import find_option_status
from alphaapollo.config.keys import (
    find_map_key_of_entry,
    find_plugin_key,
    flatten_maps,
    format_override,
    format_value,
    get_value,
    list_all_keys,
    list_keys,
    list_plugin_keys,
    merge_maps,
    move_plugin_sections,
    nest_value,
    replace_value,
)
from alphaapollo.config.renamed_keys import RENAMED_PRESETS
from alphaapollo.config.schema import Config
from alphaapollo.config.schema.base import CODE, NAMES_CODE
from alphaapollo.utils.disk import replace_file
from alphaapollo.utils.json_types import JsonObject
from alphaapollo.utils.plugins import is_available
from alphaapollo.utils.redaction import find_secret_keys_and_reasons
from alphaapollo.utils.registry import suggest_similar

SchemaT = TypeVar("SchemaT", bound=BaseModel)
MULTIRUN = ("--multirun", "-m")  # options of Hydra
SWEEP_COMMANDS = {"ppo": "rl", "sft": "sft", "dpo": "dpo", "rm": "rm"}  # {config name: word after `alphaapollo sweep`}
OPTIONS = "Options are --config, --config-name, --config-dir, --cfg and --help"
NOT_KEYS = ("defaults", "hydra")  # sections of a YAML file that are not keys
NUMBER, SPECIAL = r"[+-]?[\d.][\w.+-]*|true|false|nan|inf", r"[^\s,\[\]{}()]*[#~][^\s,\[\]{}()]*"
UNLIKE_TEXT = re.compile(rf"(?<=[=\[,])\s*({NUMBER}|{SPECIAL})\s*(?=[,\]]|$)", re.IGNORECASE)
"""Values that Hydra's parser does not read as the text that is typed: 1e3, 1_000, true, a#b, ~/a."""
HELP_EPILOG = "What a key does: alphaapollo explain KEY"


def find_command_module(schema: type[BaseModel], config_name: str) -> str:
    """Return the module of a command, e.g. `alphaapollo.trainer.main_ppo` for `ppo`."""
    return getattr(schema, "program", "") or f"alphaapollo.trainer.main_{config_name}"


def find_shipped_config_folder() -> Path:
    """Return `configs/`, the folder of the shipped YAML files: in the installed package, or at the root of a clone."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


@dataclass(frozen=True)
class UserSettings:
    """Presets and keys set by the user, e.g. `UserSettings(("algorithm=dapo",), frozenset({"trainer.seed"}))`."""

    presets: tuple[str, ...] = ()
    keys: frozenset[str] = frozenset()  # names of keys set on the command line or in the user's YAML file
    notices: tuple[str, ...] = ()  # about values of the user's YAML file that a preset replaces


NO_USER_SETTINGS = UserSettings()


@dataclass(frozen=True)
class SavedConfig:
    """Configuration that an earlier run saved in a folder, and with which a command starts."""

    folder: Path
    values: JsonObject
    read_keys: tuple[str, ...] = ("",)  # prefixes of the keys that the command reads; "" = every key


def load_config(
    schema: type[SchemaT], config_name: str, argv: Sequence[str], saved: SavedConfig | None = None
) -> SchemaT:
    """Load a configuration from command-line arguments; see load_config_and_user_settings."""
    return load_config_and_user_settings(schema, config_name, argv, saved)[0]


def load_config_and_user_settings(
    schema: type[SchemaT], config_name: str, argv: Sequence[str], saved: SavedConfig | None = None
) -> tuple[SchemaT, UserSettings]:
    """Load a configuration from command-line arguments, and return which presets and keys the user set.

    Starts from an earlier run's configuration, if given, else from the YAML file `config_name` unless argv sets
    --config or --config-name. `--help` and `--cfg` print and exit with code 0. Raises ConfigError if arguments, files,
    keys or values are wrong, or if the earlier run's configuration names code that argv does not name.
    """
    plugin_folder = Path(inspect.getfile(schema)).resolve().parent / "configs"
    shipped = [find_shipped_config_folder(), *([plugin_folder] if plugin_folder.is_dir() else [])]
    preset_files = sorted(shipped[0].glob("*/*.yaml")) if schema is Config else []
    presets = [f"{file.parent.name}={file.stem}" for file in preset_files]
    options = _parse_options(argv, schema, config_name, presets)
    folders = [Path(options.config_dir).expanduser().resolve(), *shipped] if options.config_dir else shipped
    if not folders[0].is_dir():
        raise ConfigError(f"--config-dir {options.config_dir}: no such folder. Set a folder with YAML files.")
    overrides = _parse_overrides(options.overrides, schema)
    file = options.config
    if saved is None and not file:
        file = find_yaml_file(folders, "", (options.config_name or config_name).removesuffix(".yaml"))
    start = read_user_yaml(str(file), schema) if file else (saved.values if saved else {})
    chosen = {override.key_or_group: override.value() for override in overrides if _is_preset(override, folders)}
    try:
        layers = [*_list_layers(start, schema, folders, chosen)]
    except RecursionError:
        raise ConfigError(f"{file}: the files in its defaults list include each other. Remove one entry.") from None
    unlisted = {group: name for group, name in chosen.items() if not any(f"{group}=" in label for label, _ in layers)}
    layers += _list_layers({"defaults": [{group: name} for group, name in unlisted.items()]}, schema, folders, {})
    values: JsonObject = schema().model_dump(mode="json")
    for _, layer in layers:
        merge_maps(values, layer)
    is_shipped = bool(file) and Path(file).parent in shipped
    user_values = {} if is_shipped else flatten_maps({name: start[name] for name in start if name not in NOT_KEYS})
    with_presets = flatten_maps(values)
    for override in overrides:
        if not _is_preset(override, folders):
            _apply_override(values, override)
    try:
        values = OmegaConf.to_container(OmegaConf.create(values), resolve=True)  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        raise ConfigError(" ".join(str(error).split())) from None
    _check_no_secrets(values)
    config = build_config(schema, values)
    given = {override.key_or_group: override.value() for override in overrides if "." in override.key_or_group}
    given |= flatten_maps(given)
    if saved and not file:
        config = _refuse_saved_code(config, given, saved)
    if options.cfg:
        print(dump_yaml(config), end="")
        raise SystemExit(0)
    notices = tuple(
        f"{key}={format_value(with_presets[key])} of a preset replaces {format_value(value)} of your YAML file."
        for key, value in user_values.items()
        if key not in given and with_presets.get(key, value) != value
    )
    labels = tuple(dict.fromkeys(label for label, _ in layers if label))
    return config, UserSettings(labels, frozenset([*given, *user_values]), notices)


def _refuse_saved_code(config: SchemaT, given: JsonObject, saved: SavedConfig) -> SchemaT:
    """Raise ConfigError if a key that names code has a value that is not `given` on the command line. If the command
    does not read such a key, the returned configuration has the key's default instead."""
    refused, values = JsonObject(), config.model_dump(mode="json")
    for key in list_all_keys(config).values():
        value = get_value(values, key.name)
        names_code = any(marker in (CODE, NAMES_CODE) for _, marker in key.markers)
        if not names_code or value in (key.default, given.get(key.name)):
            continue
        if key.name.startswith(saved.read_keys):
            refused[key.name] = value
        else:
            config = replace_value(config, key.name, key.default)
    refuse_saved_code(saved.folder, refused)
    return config


def refuse_saved_code(folder: Path, refused: Mapping[str, object], words: Sequence[str] = ()) -> None:
    """Raise ConfigError unless `words` set all keys of `refused`: {key naming code that must be repeated: value}."""
    refused = {key: value for key, value in refused.items() if not any(word.startswith(f"{key}=") for word in words)}
    if refused:
        texts = [format_override(key, value) for key, value in refused.items()]  # with Hydra's single quotes
        words = " ".join(
            f'"{text}"' if "'" in text and not set(text) & set('"$`!\\') else shlex.quote(text) for text in texts
        )
        raise ConfigError(
            f"{folder} names code, programs or servers, which are used only if the command names them, too. Read them. "
            f"If you trust them, add {words}"
        )


def find_yaml_file(folders: Sequence[Path], group: str, name: object) -> Path:
    """Return the first `GROUP/NAME.yaml` in the folders. Raises ConfigError with the known names if there is none."""
    files = {file.stem: file for folder in reversed(folders) for file in (folder / group).glob("*.yaml")}
    if str(name) in files:
        return files[str(name)]
    prefix, where = (f"{group}=" if group else "--config-name "), ", ".join(map(str, folders))
    if renamed := RENAMED_PRESETS.get(f"{prefix}{name}"):
        raise ConfigError(f"{prefix}{name}: renamed to {renamed}. Set {renamed}.")
    hint = suggest_similar(str(name), [*files]) or f" Known: {', '.join(f'{prefix}{stem}' for stem in sorted(files))}."
    raise ConfigError(f"{prefix}{name}: there is no {group}{'/' * bool(group)}{name}.yaml in {where}.{hint}")


def _list_layers(
    values: JsonObject, schema: type[BaseModel], folders: Sequence[Path], chosen: Mapping[str, object]
) -> Iterator[tuple[str, JsonObject]]:
    """Yield (preset or "", values) of a YAML file and of the files in its defaults list; later values override earlier.

    chosen: presets of the command line by group, which replace the presets of the file."""
    entries = values.get("defaults") or []
    entries = entries if "_self_" in entries else ["_self_", *entries]
    for entry in entries:
        if entry == "_self_":
            yield "", {key: value for key, value in values.items() if key not in NOT_KEYS}
            continue
        group, _, name = str(entry).rpartition("/")  # GROUP/NAME
        if isinstance(entry, dict):  # {GROUP: NAME}
            group, name = next(iter(entry.items()))
        group = str(group).removeprefix("override ").strip("/")
        names = chosen.get(group, name)
        presets = names if isinstance(names, list) else [names]
        for preset in presets:
            file = find_yaml_file(folders, group, preset)
            is_global = not group or "@package _global_" in file.read_text(encoding="utf-8").partition("\n")[0]
            for label, layer in _list_layers(read_user_yaml(str(file), schema), schema, folders, chosen):
                yield (f"{group}={preset}" if group else label), (layer if is_global else nest_value(group, layer))


def _apply_override(values: JsonObject, override: Override) -> None:
    """Set, merge or delete the value of a key in nested values."""
    key, value = override.key_or_group, override.value()
    if not override.is_delete() and value != {}:
        merge_maps(values, nest_value(key, value))
        return
    *outer, last = key.split(".")
    for part in outer:
        values = values.setdefault(part, {})
    values.pop(last, None)
    if not override.is_delete():
        values[last] = {}


def _takes_text(schema: type[BaseModel], name: str) -> bool:
    """Return whether a key, or an entry of a map, is a text or a list of texts."""
    name = find_plugin_key(name, schema)
    keys, map_key = list_keys(schema), find_map_key_of_entry(name, schema)
    value_type = keys[map_key].type.partition(" to ")[2] if map_key else ""
    if key := keys.get(name) or list_plugin_keys(name, schema).get(name):
        value_type = key.type
    is_model_path = value_type.startswith("a section") and name.endswith("path")  # in a map of models
    return value_type.startswith("text") or "list of text" in value_type or is_model_path


def read_user_yaml(file: str, schema: type[BaseModel]) -> JsonObject:
    """Read the user's YAML file. Values of text keys are text as it is written, e.g. 007 or 2026-01-01.

    Raises ConfigError if the file cannot be read or does not contain keys and values."""
    try:
        loader = get_yaml_loader()(Path(file).expanduser().read_text(encoding="utf-8"))
        node = loader.get_single_node()
        _mark_texts(node, "", schema)
        values = loader.construct_document(node) if node else None
        json.dumps(values, ensure_ascii=False, default=str).encode()  # raises for an unpaired surrogate
    except (OSError, UnicodeError, TypeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{file}: the file cannot be read ({' '.join(str(error).split())}). Fix it, or set another file."
        ) from None
    if not isinstance(values, dict | None):
        shown = f"expected KEY: VALUE lines, got {format_value(values)[:60]}"
        raise ConfigError(f"{file}: {shown}. Write e.g. trainer: {{seed: 1}}.")
    if not isinstance((values or {}).get("defaults", []), list):
        raise ConfigError(f"{file}: defaults must be a list. Write e.g. defaults: [algorithm: dapo, _self_].")
    found = {str(key): value for key, value in (values or {}).items()}
    move_plugin_sections(found, schema)
    return found


def _mark_texts(node: yaml.Node | None, name: str, schema: type[BaseModel]) -> None:
    """Mark the values of text keys in parsed YAML as texts."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            _mark_texts(value, f"{name}.{key.value}".lstrip("."), schema)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _mark_texts(item, name, schema)
    elif node is not None and node.tag != "tag:yaml.org,2002:null" and _takes_text(schema, name):
        node.tag = "tag:yaml.org,2002:str"


def drop_unknown_keys(schema: type[BaseModel], values: Mapping[str, object]) -> JsonObject:
    """Return the values of a saved configuration without keys that the schema does not have (any more)."""
    found: JsonObject = {name: values[name] for name in schema.model_fields if name in values}
    for name, value in found.items():
        section = schema.model_fields[name].annotation
        if isinstance(section, type) and issubclass(section, BaseModel) and isinstance(value, Mapping):
            found[name] = drop_unknown_keys(section, value)
    return found


def _check_no_secrets(values: JsonObject) -> None:
    """Raise ConfigError if a value contains a secret, e.g. an API key: values are printed and saved to config.yaml."""
    if errors := [
        f"{key} contains {reason}, but configurations are saved to config.yaml. Remove the secret, and set an "
        "environment variable instead."
        for key, reason in find_secret_keys_and_reasons(values)
    ]:
        raise ConfigError(errors)


def check_override(schema: type[SchemaT], override: str) -> SchemaT:
    """Return the defaults with an override `KEY=VALUE`. Raises ConfigError for an unknown key, or a value that the key
    does not accept."""
    (parsed,) = _parse_overrides([override], schema)
    return build_config(schema, json.loads(json.dumps(nest_value(parsed.key_or_group, parsed.value()), default=str)))


def dump_yaml(config: BaseModel) -> str:
    """Return the complete configuration as YAML that load_config can read."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def save_config(config: BaseModel, path: Path) -> None:
    """Write the complete configuration to a YAML file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, [dump_yaml(config).encode()])


def _parse_options(
    argv: Sequence[str], schema: type[BaseModel], config_name: str, presets: Sequence[str]
) -> argparse.Namespace:
    program = f"python -m {find_command_module(schema, config_name)}"
    parser = argparse.ArgumentParser(program, allow_abbrev=False, exit_on_error=False, epilog=HELP_EPILOG)
    setting = "a key to set, e.g. trainer.seed=1 or data.train_files=[a.parquet,b.parquet], or a preset to apply: "
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=setting + (", ".join(presets) or "none"))
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--config", metavar="FILE", help="your own YAML file, on top of the defaults")
    source.add_argument("--config-name", metavar="NAME", help="the YAML file to start from, by name")
    parser.add_argument("--config-dir", metavar="DIR", help="your own folder of YAML files, searched first")
    parser.add_argument("--cfg", action="store_true", help="print the composed configuration and exit")
    try:
        options, unknown = parser.parse_known_intermixed_args(list(argv))
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error}. See --help.") from None
    swept = SWEEP_COMMANDS.get(config_name) if is_available("commands", "sweep") else None
    if unknown and unknown[0] in MULTIRUN and swept:
        words = shlex.join([swept, *(word for word in argv if word not in MULTIRUN)])
        raise ConfigError(f"{unknown[0]}: a command is one run. For all combinations, run: alphaapollo sweep {words}")
    if unknown:
        name = unknown[0].lstrip("-").partition("=")[0].replace("-", "_")
        status = "a key" if name in list_keys(schema) else find_option_status(name, schema)
        hint = f"It is {status}. Keys are set without dashes: KEY=VALUE" if status else OPTIONS
        raise ConfigError(f"unknown option {unknown[0]}. {hint}.")
    return options


def _parse_overrides(words: Sequence[str], schema: type[BaseModel]) -> list[Override]:
    overrides = [parse_override(word, schema) for word in words]
    for word, override in zip(words, overrides, strict=True):
        if override.is_sweep_override():
            key, _, value = word.partition("=")
            one_run = f"Set one, or write a list: '{key}=[{value}]'."
            all_runs = " For a run with each: alphaapollo sweep." if is_available("commands", "sweep") else ""
            raise ConfigError(f"{word} sets several values. {one_run}{all_runs}")
    return overrides


def parse_override(word: str, schema: type[BaseModel]) -> Override:
    """Parse `KEY=VALUE`. A text that Hydra reads as something else, e.g. trainer.experiment_name=1e3, is quoted."""
    if "'" not in word and '"' not in word and _takes_text(schema, word.partition("=")[0].lstrip("+")):
        word = UNLIKE_TEXT.sub(r"'\1'", word)
    try:
        word.encode()  # raises for an unpaired surrogate
        override = OverridesParser.create().parse_override(word)
    except (HydraException, ValueError) as error:  # ValueError: a number with thousands of digits
        reason = str(error).replace("missing EQUAL at '<EOF>'", "there is no =")
        raise ConfigError(
            f"{word}: not of the form KEY=VALUE ({reason}). Quote values with special characters twice: "
            f"""'KEY="a value"'."""
        ) from None
    override.key_or_group = find_plugin_key(override.key_or_group, schema)
    if not override.key_or_group:
        raise ConfigError(f"{word}: not of the form KEY=VALUE (there is no key before the =).")
    return override


def _is_preset(override: Override, folders: Sequence[Path]) -> bool:
    """Return whether an override selects presets, e.g. `algorithm=dapo`, or sets keys of a section of the same name."""
    name = override.key_or_group
    is_group = name.isidentifier() and any((folder / name).is_dir() for folder in folders)
    return is_group and isinstance(override.value(), str | list)
