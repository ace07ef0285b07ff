"""Convert options of another project to keys of a command, with the tables of the project (config/key_tables.py)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

from pydantic import BaseModel

from alphaapollo.config.errors import ConfigError
from alphaapollo.config.key_tables import Answer, KeyTable, exists, find_answer, load_project
from alphaapollo.config.keys import COMMANDS, format_override, format_value, list_keys
from alphaapollo.config.load import check_override
from alphaapollo.config.renamed_keys import describe_rename
from alphaapollo.plugins.port.rules import RULES, ConvertedKeys, Options
from alphaapollo.plugins.port.shell import MACHINE_VALUE

NOT_KNOWN = "not a known"  # in the comment of an option that the tables do not have
ArgumentLines = dict[str, tuple[str, str]]  # key -> (`KEY=VALUE` or empty, comment)


def translate_keys(values: Options, command: str, project: str = "verl", program: str = "") -> ArgumentLines:
    """Translate options to commented arguments of `command`, and add the project's defaults if they differ from ours.

    program: name of the project's program, whose defaults count before those of the tables.
    """
    schema, table, lines = COMMANDS[command], load_project(project).tables[command], ArgumentLines()
    defaults = _list_defaults(project, program, table)
    options = {**({} if project == "verl" else defaults), **values, "program": program}
    options.setdefault("processes", _count_processes(values))
    for option, value in values.items():
        words, remark = _convert_option(project, option, value, options, command)
        if remark and not words:
            lines[f"# {option}"] = ("", f"{option}={value}: {remark}")
        for ours, text in words.items():
            lines[ours] = _format_argument(ours, text, remark, schema)
            remark = ""
    for key, (text, remark) in _compute_keys(table, options, values).items():
        lines.setdefault(key, _format_argument(key, text, remark, schema))
    for key, rank in [(key, key.replace("alpha", "rank")) for key in lines if key.endswith("lora_alpha")]:
        if lines.get(rank, ("=0", ""))[0].endswith("=0"):
            lines[key] = ("", f"{key}: left out, there is no lora_rank")
    if "trainer.async_mode" in lines:
        method = "algorithm.rollout_correction.method"
        lines.setdefault(method, (f"{method}=tis", "samples are older than the weights"))
    for key, (text, remark) in _list_other_defaults(project, defaults, options, values, command):
        lines.setdefault(key, (f"{key}={text}", remark))
    return lines


def _list_defaults(project: str, program: str, table: KeyTable) -> dict[str, str]:
    """Return the defaults of a program's options."""
    found = table.default | table.default_in_prompts
    for pattern, defaults in load_project(project).program_defaults.items():
        if fnmatchcase(program, pattern):
            found = {**found, **defaults}
    return {option: format_value(value) for option, value in found.items()}


def _count_processes(values: Options) -> str:
    counts = [values.get(name, "") for name in ("num_processes", "nproc_per_node", "train.gpus", "nnodes")]
    return str(math.prod(int(count) for count in counts if count.isdigit()))


def _list_other_defaults(
    project: str, defaults: Options, options: Options, values: Options, command: str
) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield the keys whose default differs from the default of an option that is not set: (key, (value, remark))."""
    keys, name = list_keys(COMMANDS[command]), load_project(project).name
    for option, value in defaults.items():
        other, unset, needed = load_project(project).tables[command].default_requires.get(option, ("", "", ""))
        if option in values or (other and values.get(other, unset).lower() not in needed.split("|")):
            continue
        words, _ = _convert_option(project, option, value, {**options, option: value}, command)
        for key, text in words.items():
            if key in keys and text != format_value(keys[key].default):
                theirs = f" of {option}" + (f" is {value}" if value.lower() != text else "")
                yield key, (text, f"{name}'s default" + theirs * (option != key))


def _convert_option(project: str, option: str, value: str, options: Options, command: str) -> ConvertedKeys:
    schema, table = COMMANDS[command], load_project(project).tables[command]
    rule = RULES[project].get(option)
    if rule and (project != "verl" or command == "main_ppo" or option.startswith("trainer.")):
        return rule(value, options)
    if project == "verl" and ".engine_kwargs." in option:
        return {}, "left out: the engine may not have it, or another key sets it; add it if you need it"
    if project == "verl":
        known = list_keys(schema).get(option)
        if value == "null" and known is not None and "null" not in known.type:
            return {}, "the default here"
        if exists(option, schema):
            ours = str(table.values.get(option, {}).get(value, value))
            return {option: ours}, f"was {value}" if ours != value else ""
    answer = find_answer(project, option, schema)
    if project == "verl" and (rename := describe_rename(option)):
        is_renamed = rename.startswith("renamed to ")
        answer = Answer(rename, rename.removeprefix("renamed to ") if is_renamed else "")
    if answer is None:
        return {}, f"{NOT_KNOWN} {'key' if project == 'verl' else 'option'} of {load_project(project).name}"
    if answer.key:
        ours = str(table.values.get(answer.key, {}).get(value, value))
        known = list_keys(schema).get(answer.key)
        if value == "null" and (project == "verl" or known is None or "null" not in known.type):
            return {}, f"{answer.key} keeps its default"
        remark = f"({answer.remark})" if answer.remark else ""
        return {answer.key: ours}, f"was {option} {remark}".rstrip() if option != answer.key else answer.remark
    if not answer.cases:
        return {}, answer.status
    case = next((case for case in answer.cases if _is_met(case, value, options)), None)
    if case is None:
        return {}, f"not converted; {answer.remark or 'the value has no counterpart'}"
    words = {key: _fill_template(text, value, options) for key, text in answer.cases[case].items()}
    return words, "; ".join(filter(None, [f"was {option}={value}" if words else "", answer.remark]))


def _is_met(case: str, value: str, options: Options) -> bool:
    """Return whether a condition of the table `cases` holds (verl_keys.yaml describes them)."""
    return all(
        _matches(options.get(name, "null") if equals else value, wanted)
        for name, equals, wanted in (part.rpartition("=") for part in case.split("&"))
    )


def _matches(value: str, wanted: str) -> bool:
    number, limit = _parse_number(value), _parse_number(wanted.removeprefix("<"))
    if number is not None and limit is not None:
        return number < limit if wanted.startswith("<") else number == limit
    return fnmatchcase(value, wanted)


def _parse_number(text: str) -> float | None:
    return float(text) if re.fullmatch(r"[+-]?[\d.]*\d[\d.]*(?:[eE][+-]?\d+)?", text) else None


def _fill_template(text: object, value: str, options: Options) -> str:
    if not isinstance(text, str) or "{" not in text:
        return format_value(text)
    items = [item.strip() for item in value.strip("[]").split(",")]
    return text.format(value, *items, **options)


def _compute_keys(table: KeyTable, options: Options, values: Options) -> Mapping[str, tuple[str, str]]:
    """Return the keys that are products of options: {key: (value, product)}."""
    found = {}
    for key, alternatives in table.computed.items():
        for product in alternatives.split("|"):
            names = product.split()
            numbers = [_parse_number(options.get(name, name)) for name in names[::2]]
            if None not in numbers:
                total = float(numbers[0] or 0)
                for sign, number in zip(names[1::2], numbers[1:], strict=True):
                    total = total * (number or 0) if sign == "*" else total / (number or 1)
                one = ", for one process" if "processes" in names and options["processes"] == "1" else ""
                given = {*names} & values.keys() or len(names) == 1
                found[key] = (
                    f"{total:.10g}",
                    f"{product.strip()}{one}" if given else f"a default, {product.strip()}{one}",
                )
                break
    return found


def _format_argument(key: str, value: str, remark: str, schema: type[BaseModel]) -> tuple[str, str]:
    """Return `KEY=VALUE` and its comment; only a comment if the key does not accept the value's type."""
    try:
        if not MACHINE_VALUE.search(value):
            check_override(schema, f"{key}={value}")
    except ConfigError as error:
        if wrong := [line for line in error.errors if line.startswith(f"{key}: expected")]:
            return "", f"{key}={value}: left out. {wrong[0]}"
        if "not of the form" in str(error):  # characters that Hydra does not read, e.g. `<your-data>`
            return format_override(key, value), remark
        # Arguments with other errors, e.g. of a range, are kept: the command reports them.
    return f"{key}={value}", remark
