"""python -m alphaapollo.config explain KEY[=VALUE]|METRIC ...   print what each key or metric means, in one line
python -m alphaapollo.config port SCRIPT [KEY=VALUE ...] [NAME=VALUE ...] [-- ARG ...]
    convert a script of verl, TRL, OpenRLHF or ms-swift (docs/verl.md)"""

from __future__ import annotations

import re
import sys

from alphaapollo.config.build import find_similar_keys
from alphaapollo.config.check import find_unknown_names
from alphaapollo.config.errors import EXIT_CODE, ConfigError, report_error
from alphaapollo.config.key_tables import KeyTable, find_key_status, find_option_status, load_project
from alphaapollo.config.keys import (
    COMMANDS,
    find_map_key_of_entry,
    find_plugin_key,
    format_value,
    list_keys,
    list_plugin_keys,
    list_sections,
)
from alphaapollo.config.load import check_override
from alphaapollo.config.metrics import explain_metric
from alphaapollo.config.renamed_keys import describe_rename
from alphaapollo.config.schema.plugins import describe_missing_section
from alphaapollo.config.verl import find_differences_from_verl
from alphaapollo.utils.plugins import load_plugin


def main(argv: list[str]) -> int:
    match argv:
        case ["explain" | "port", *names] if {"-h", "--help"} & set(names):
            print(__doc__)
        case ["explain", *names] if names:
            print("\n".join(explain_key(name) for name in names))
        case ["port", _, *_]:
            try:
                port = load_plugin("commands", "port")
            except ValueError as error:
                return report_error(error, EXIT_CODE)
            return int(port(argv[1:]))
        case _:
            print(__doc__, file=sys.stderr)
            return EXIT_CODE
    return 0


def explain_key(name: str) -> str:
    """Return one line about KEY or KEY=VALUE: accepted, renamed, dropped, not supported, refused, or unknown with
    similar keys; or about a metric, which has a slash in its name."""
    name, equals, value = name.lstrip("+~-").partition("=")
    if "/" in name:
        return explain_metric(name)
    for schema in COMMANDS.values():
        name = find_plugin_key(name, schema)
    keys = {command: list_keys(schema) | list_plugin_keys(name, schema) for command, schema in COMMANDS.items()}
    found = {command: known[name] for command, known in keys.items() if name in known}
    if found:
        first, *other_commands = found
        if equals and (error := find_value_error(first, name, value)):
            return error
        key = found[first]
        defaults = format_value(key.default) if first == "main_ppo" else f"{format_value(key.default)} in {first}"
        defaults += "".join(
            f", {format_value(found[command].default)} in {command}"
            for command in other_commands
            if found[command].default != key.default
        )
        difference = find_differences_from_verl(COMMANDS[first]).get(name)
        in_verl = f"; difference from verl: {difference}" if difference else ""
        return f"{name}: accepted (default {defaults}, {key.meaning.removesuffix('.')}{in_verl})"
    for schema in COMMANDS.values():
        if name in list_sections(schema):
            return f"{name}: accepted (a section with {', '.join(list_sections(schema)[name])})"
    for schema in COMMANDS.values():
        if (map_key := find_map_key_of_entry(name, schema)) is not None:
            meaning = list_keys(schema)[map_key].meaning.removesuffix(".")
            return f"{name}: accepted (an entry of the map {map_key}: {meaning})"
    if (
        status := describe_rename(name)
        or describe_missing_section(name)
        or find_key_status("verl", name, *COMMANDS.values())
    ):
        return f"{name}: {status}"
    if status := find_option_status(name, *COMMANDS.values()):
        return f"{name}: {status}"
    near = find_similar_keys(name, {key: None for schema in COMMANDS.values() for key in list_keys(schema)})
    return f"{name}: unknown (nearest {', '.join(near)})" if near else f"{name}: unknown (no similar key)"


def find_value_error(command: str, name: str, value: str) -> str:
    """Return why a command refuses a value of a key, whatever the other keys are; "" if it does not."""
    table = load_project("verl").tables.get(command, KeyTable())
    ours = table.values.get(name, {}).get(value, value)
    try:
        errors = [*find_unknown_names(check_override(COMMANDS[command], f"{name}={ours}"))]
    except ConfigError as error:
        errors = error.errors
    return next((error for error in errors if re.match(rf"{re.escape(name)}(=[^,]*)?: ", error)), "")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
