"""Load the configuration of a command from its arguments and YAML files.

schema defaults -> shipped or user's YAML -> presets (algorithm=dapo) -> key=value     composed by Hydra
                                                             |
                                   strict conversion to the schema's classes (pydantic)
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf._utils import get_yaml_loader  # reads 1e-6 as a number, unlike PyYAML's loader
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel

from alphaapollo.config.build import build_config, describe_unknown_key
from alphaapollo.config.errors import ConfigError
from alphaapollo.config.keys import VERL_GROUP_SIZE, find_map_key_of_entry, format_value, list_keys, list_sections
from alphaapollo.config.renamed_keys import check_not_set_twice, describe_rename, find_new_name, move_renamed_keys
from alphaapollo.config.schema import Config
from alphaapollo.utils.json_types import JsonObject
from alphaapollo.utils.redaction import find_secret_keys_and_reasons
from alphaapollo.utils.registry import suggest_similar

SchemaT = TypeVar("SchemaT", bound=BaseModel)
IGNORED = ("defaults", "hydra")  # sections of a YAML file for Hydra
NUMBER, SPECIAL = r"[+-]?[\d.][\w.+-]*|true|false|nan|inf", r"[^\s,\[\]{}()]*[#~][^\s,\[\]{}()]*"
UNLIKE_TEXT = re.compile(rf"(?<=[=\[,])\s*({NUMBER}|{SPECIAL})\s*(?=[,\]]|$)", re.IGNORECASE)
"""Values that Hydra does not read as the text that is typed: 1e3, 1_000, true, a#b, ~/a."""
USER_FILE = "_own"  # name of the user's YAML file in Hydra

EXPLAIN = "Pages of all keys: docs/config.md. One key: python -m alphaapollo.config explain KEY"


def find_command_module(config_name: str) -> str:
    """Return the module of the command that a shipped YAML file configures: `trainer.main_ppo` for `ppo`."""
    return {"evolving": "evolving.main"}.get(config_name, f"trainer.main_{config_name}")


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


def load_config(
    schema: type[SchemaT], config_name: str, argv: Sequence[str], saved_values: dict[str, Any] | None = None
) -> SchemaT:
    """Load a configuration from command-line arguments; see load_config_and_user_settings."""
    return load_config_and_user_settings(schema, config_name, argv, saved_values)[0]


def load_config_and_user_settings(
    schema: type[SchemaT], config_name: str, argv: Sequence[str], saved_values: dict[str, Any] | None = None
) -> tuple[SchemaT, UserSettings]:
    """Load a configuration from command-line arguments, and return which presets and keys the user set.

    Starts from the values saved by an earlier run, if given, else from the YAML file `config_name` unless argv sets
    --config or --config-name. `--help` and `--cfg` print and exit with code 0. Raises ConfigError if arguments, files,
    keys or values are wrong.
    """
    shipped = find_shipped_config_folder()
    presets = _list_presets([shipped]) if schema is Config else []
    options = _parse_options(argv, find_command_module(config_name), presets)
    name = (options.config_name or config_name).removesuffix(".yaml")
    user_values = read_user_yaml(options.config, schema) if options.config else saved_values
    config_folders = [shipped]
    if options.config_dir is not None:
        config_folders.insert(0, Path(options.config_dir).expanduser().resolve())
        if not config_folders[0].is_dir():
            raise ConfigError(f"--config-dir {options.config_dir}: no such folder. Set a folder with YAML files.")
    overrides = _parse_overrides(options.overrides, schema)
    _check_override_keys(overrides, schema, config_folders)
    if user_values is None and options.config_dir and (file := config_folders[0] / f"{name}.yaml").is_file():
        user_values = read_user_yaml(str(file), schema)
    file_keys = flatten_maps(user_values or {})
    old_names = move_renamed_keys(user_values or {})
    values = _compose_values(schema, name if user_values is None else USER_FILE, config_folders, overrides, user_values)
    check_not_set_twice([*(override.key_or_group for override in overrides), *file_keys])
    for old_name in [*old_names, *move_renamed_keys(values)]:
        _warn_of_old_name(old_name)
    _check_no_secrets(values)
    config = build_config(schema, values)
    if options.cfg:
        print(dump_yaml(config), end="")
        raise SystemExit(0)
    return config, _collect_user_settings(overrides, config_folders, user_values or {}, flatten_maps(values))


def _takes_text(schema: type[BaseModel], name: str) -> bool:
    """Return whether a key, or an entry of a map, is a text or a list of texts."""
    known = list_keys(schema)
    map_key = find_map_key_of_entry(name, schema)
    described = known[map_key].type.partition(" to ")[2] if map_key else known[name].type if name in known else ""
    return described.startswith("text") or "list of text" in described


@cache  # once per process
def _warn_of_old_name(name: str) -> None:
    print(f"warning: {name} is {describe_rename(name)}.", file=sys.stderr)


def read_user_yaml(file: str, schema: type[BaseModel]) -> JsonObject:
    """Read the user's YAML file. Values of text keys are text as it is written, e.g. 007 or 2026-01-01.

    Raises ConfigError if the file cannot be read or does not contain keys and values."""
    try:
        loader = get_yaml_loader()(Path(file).expanduser().read_text(encoding="utf-8"))
        node = loader.get_single_node()
        _mark_texts(node, "", schema)
        values = loader.construct_document(node) if node else None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{file}: the file cannot be read ({' '.join(str(error).split())}). Fix it, or set another file."
        ) from None
    if not isinstance(values, dict | None):
        got = format_value(values)[:60]
        raise ConfigError(f"{file}: expected KEY: VALUE lines, got {got}. Write e.g. trainer: {{seed: 1}}.")
    if not isinstance((values or {}).get("defaults", []), list):
        raise ConfigError(f"{file}: defaults must be a list. Write e.g. defaults: [algorithm: dapo, _self_].")
    return {str(key): value for key, value in (values or {}).items()}


def _mark_texts(node: yaml.Node | None, name: str, schema: type[BaseModel]) -> None:
    """Mark the values of text keys in parsed YAML as texts."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            _mark_texts(value, f"{name}.{key.value}".lstrip("."), schema)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _mark_texts(item, name, schema)
    elif node is not None and node.tag != "tag:yaml.org,2002:null" and _takes_text(schema, find_new_name(name)):
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
    errors = [
        f"{key} contains {reason}, but configurations are saved to config.yaml. Remove the secret, and set an "
        "environment variable instead."
        for key, reason in find_secret_keys_and_reasons(values)
    ]
    if errors:
        raise ConfigError(errors)


def check_override(schema: type[BaseModel], override: str) -> None:
    """Raise ConfigError if an override `KEY=VALUE` has an unknown key or a value that the key does not accept."""
    (parsed,) = _parse_overrides([override], schema)
    _check_override_keys([parsed], schema, [])
    values = parsed.value()
    for part in reversed(parsed.key_or_group.split(".")):
        values = {part: values}
    build_config(schema, json.loads(json.dumps(values, default=str)))


def dump_yaml(config: BaseModel) -> str:
    """Return the complete configuration as YAML that load_config can read."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def save_config(config: BaseModel, path: Path) -> None:
    """Write the complete configuration to a YAML file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(dump_yaml(config), encoding="utf-8")
    part.replace(path)


def _parse_options(argv: Sequence[str], module: str, presets: Sequence[str]) -> argparse.Namespace:
    program = f"python -m alphaapollo.{module}"
    parser = argparse.ArgumentParser(program, allow_abbrev=False, exit_on_error=False, epilog=EXPLAIN)
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
    if unknown:
        raise ConfigError(
            f"unknown option {unknown[0]}. Options are --config, --config-name, --config-dir, --cfg and --help."
        )
    return options


def _list_presets(config_folders: Sequence[Path]) -> list[str]:
    """Return the overrides that select the presets in the folders, e.g. `algorithm=dapo` for `algorithm/dapo.yaml`."""
    return sorted({f"{file.parent.name}={file.stem}" for folder in config_folders for file in folder.glob("*/*.yaml")})


def flatten_maps(values: JsonObject, prefix: str = "") -> JsonObject:
    """Flatten nested maps to one map with dotted keys: `{"trainer": {"seed": 1}}` to `{"trainer.seed": 1}`."""
    found: JsonObject = {}
    for name, value in values.items():
        found |= (
            flatten_maps(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {f"{prefix}{name}": value}
        )
    return found


def _collect_user_settings(
    overrides: Sequence[Override],
    config_folders: Sequence[Path],
    user_yaml: JsonObject,
    composed: JsonObject,
) -> UserSettings:
    """Collect what the user set on the command line (overrides) or in a YAML file. `composed`: {key: final value}."""
    named = {override.key_or_group: override.value() for override in overrides}
    listed = [entry for entry in user_yaml.get("defaults", []) if isinstance(entry, dict)]
    groups = {name: value for entry in [*listed, named] for name, value in entry.items()}
    groups = {name: value for name, value in groups.items() if _is_preset_group(name, config_folders)}
    presets = tuple(f"{group}={format_value(value)}" for group, value in groups.items())
    inner = [f"{key}.{name}" for key, value in named.items() if isinstance(value, dict) for name in flatten_maps(value)]
    on_command_line = [*(key for key in named if "." in key), *inner]
    in_file = {name: value for name, value in flatten_maps(user_yaml).items() if name.split(".")[0] not in IGNORED}
    notices = tuple(
        f"{key}={format_value(composed[key])} of a preset replaces {format_value(value)} of your YAML file."
        for key, value in in_file.items()
        if key not in on_command_line and composed.get(key, value) != value and "${" not in str(value)
    )
    return UserSettings(presets, frozenset(map(find_new_name, [*on_command_line, *in_file])), notices)


def _parse_overrides(words: Sequence[str], schema: type[BaseModel]) -> list[Override]:
    parser = OverridesParser.create()
    overrides = []
    for word in words:
        if not {*"'\""} & {*word} and _takes_text(schema, find_new_name(word.partition("=")[0].lstrip("+"))):
            word = UNLIKE_TEXT.sub(r"'\1'", word)
        try:
            override = parser.parse_override(word)
        except (HydraException, ValueError) as error:  # ValueError: a number with thousands of digits
            reason = str(error).replace("missing EQUAL at '<EOF>'", "there is no =")
            raise ConfigError(
                f"{word}: not of the form KEY=VALUE ({reason}). Quote values with special characters twice: "
                f"""'KEY="a value"'."""
            ) from None
        if not override.key_or_group:
            raise ConfigError(f"{word}: not of the form KEY=VALUE (there is no key before the =).")
        if override.is_sweep_override():
            key, _, value = word.partition("=")
            raise ConfigError(f"{word} sets several values. Set one, or write a list: '{key}=[{value}]'.")
        overrides.append(override)
    return overrides


def _check_override_keys(
    overrides: Sequence[Override], schema: type[BaseModel], config_folders: Sequence[Path]
) -> None:
    known = {*list_keys(schema), *list_sections(schema), *([VERL_GROUP_SIZE] if schema is Config else [])}
    errors = []
    for override in overrides:
        name, got = find_new_name(override.key_or_group), override.value()
        if _is_preset_group(name, config_folders):
            if isinstance(got, str) and f"{name}={got}" not in _list_presets(config_folders):
                presets = [preset for preset in _list_presets(config_folders) if preset.startswith(f"{name}=")]
                hint = suggest_similar(got, [preset.partition("=")[2] for preset in presets])
                hint = hint or f" Known: {', '.join(presets)}."
                errors.append(f"{name}={got}: no such preset.{hint}")
        elif name not in known and not find_map_key_of_entry(name, schema):
            errors.append(describe_unknown_key(name, schema, got))
    if errors:
        raise ConfigError(errors)


def _is_preset_group(name: str, config_folders: Sequence[Path]) -> bool:
    """Return whether the name is a folder of presets, such as `algorithm` in `algorithm=dapo`."""
    return name.isidentifier() and any((folder / name).is_dir() for folder in config_folders)


def _compose_values(
    schema: type[BaseModel],
    config_name: str,
    config_folders: Sequence[Path],
    overrides: Sequence[Override],
    user_values: JsonObject | None,
) -> JsonObject:
    """Merge defaults, YAML files, presets and overrides with Hydra. Hydra gets all defaults, so no key needs a `+`."""
    if user_values is None and not any((folder / f"{config_name}.yaml").is_file() for folder in config_folders):
        names = sorted({file.stem for folder in config_folders for file in folder.glob("*.yaml")})
        where, hint = ", ".join(map(str, config_folders)), suggest_similar(config_name, names)
        raise ConfigError(
            f"--config-name {config_name}: there is no {config_name}.yaml in {where}.{hint} Known: {', '.join(names)}."
        )
    store = ConfigStore.instance()
    store.store(name="_schema", node=schema().model_dump(mode="json"))
    store.store(name="_composed", node={"defaults": ["_schema", config_name, "_self_"]})
    search = "hydra.searchpath=[" + ",".join(f"'file://{folder}'" for folder in config_folders[1:]) + "]"
    try:
        if user_values is not None:
            store.store(name=USER_FILE, node=user_values)
        with initialize_config_dir(str(config_folders[0]), version_base="1.3"):
            selected = set[str]()  # groups of presets that the YAML files select
            if any(_is_preset_group(override.key_or_group, config_folders) for override in overrides):
                composed = compose("_composed", overrides=[search], return_hydra_config=True)
                selected = {*composed.hydra.runtime.choices}
            words = [_format_hydra_override(override, selected, config_folders) for override in overrides]
            values = OmegaConf.to_container(compose("_composed", overrides=[search, *words]), resolve=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        wrong = _find_wrong_kind(schema().model_dump(mode="json"), user_values or {})
        raise ConfigError(wrong or _format_hydra_error(error, config_name)) from None
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _find_wrong_kind(defaults: JsonObject, values: JsonObject, section: str = "") -> str:
    """Describe the first key whose value is a list instead of a section, or a section instead of a list; else ""."""
    for name, value in values.items():
        default, key = defaults.get(name), f"{section}{name}"
        if isinstance(default, dict | list) and isinstance(value, dict | list) and type(default) is not type(value):
            kind = "a list" if isinstance(default, list) else "a section (KEY: VALUE)"
            return f"{key}={str(value)[:80]} must be {kind}."
        if (
            isinstance(default, dict)
            and isinstance(value, dict)
            and (found := _find_wrong_kind(default, value, f"{key}."))
        ):
            return found
    return ""


def _format_hydra_override(override: Override, selected_groups: set[str], config_folders: Sequence[Path]) -> str:
    """Format an override for Hydra: `+` before a preset if its group has none selected yet, `++` before a key."""
    assert override.input_line is not None
    if override.is_delete():
        return override.input_line
    if override.value() == {}:  # Hydra ignores an empty map, so remove the key
        return f"~{override.key_or_group}"
    word = override.input_line.lstrip("+")
    if _is_preset_group(override.key_or_group, config_folders) and isinstance(override.value(), str | list):
        return word if override.key_or_group in selected_groups else f"+{word}"
    return f"++{word}"


def _format_hydra_error(error: Exception, config_name: str) -> str:
    text = str(error).split("Config search path:")[0]
    where = "your YAML file" if config_name == USER_FILE else f"{config_name}.yaml"
    return f"{where}: " + " ".join(re.sub(rf"In '(_composed|{USER_FILE})': ", "", text).split()).rstrip(".") + "."
