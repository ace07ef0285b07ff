"""Look up the options of other projects: what each option of verl, TRL, OpenRLHF and ms-swift is here.

verl_keys.yaml, trl_keys.yaml, openrlhf_keys.yaml and swift_keys.yaml have the same tables, which a comment at the start
of verl_keys.yaml describes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from importlib import resources

import yaml
from pydantic import BaseModel

from alphaapollo.config.keys import COMMANDS, find_map_key_of_entry, list_keys, list_sections
from alphaapollo.utils.json_types import JsonObject

PROJECTS = {"verl": "verl", "trl": "TRL", "openrlhf": "OpenRLHF", "swift": "ms-swift"}
"""{start of a file's name, e.g. `swift` of swift_keys.yaml: name of the project}"""


@dataclass(frozen=True)
class Answer:
    """What an option of another project is here: another key, several keys that depend on its value, or nothing."""

    status: str  # e.g. "renamed to env.max_steps (turns)", "dropped because ...", "not supported (...; instead: ...)"
    key: str = ""  # key of this project, if the option is only renamed
    cases: JsonObject = field(default_factory=dict)  # {condition: {key of this project: value}}
    remark: str = ""


@dataclass
class KeyTable:
    """Options of another project for one command of this project. All maps except `values` and `computed` have the
    options as keys."""

    answers: dict[str, Answer] = field(default_factory=dict)  # by name, or by pattern with `*`
    meaning: dict[str, str] = field(default_factory=dict)  # differences of options with a counterpart
    default: JsonObject = field(default_factory=dict)
    default_in_prompts: JsonObject = field(default_factory=dict)
    default_requires: dict[str, list[str]] = field(default_factory=dict)
    values: dict[str, JsonObject] = field(default_factory=dict)  # {key of this project: {their value: our value}}
    computed: dict[str, str] = field(default_factory=dict)  # {key of this project: products of options}

    def add(self, entries: JsonObject, schema: type[BaseModel]) -> None:
        """Add the entries of a file; they replace earlier entries. Keys of fine-tuning become keys of `schema`."""
        meanings = entries.get("meaning", {})
        for option, text in entries.get("renamed", {}).items():
            new, _, remark = text.partition(" ")
            new = find_key_in_section(new, schema)
            self.answers[option] = Answer(f"renamed to {new} {remark}".rstrip(), new, remark=remark.strip("()"))
        for option, cases in entries.get("cases", {}).items():
            ours = {
                case: {find_key_in_section(new, schema): value for new, value in settings.items()}
                for case, settings in cases.items()
            }
            names = ", ".join(dict.fromkeys(new for settings in ours.values() for new in settings))
            remark = meanings.get(option, "")
            status = f"converted to {names}" if names else f"dropped because {remark}"
            self.answers[option] = Answer(status, cases=ours, remark=remark)
        for name, verdict in (("dropped", "dropped because {}"), ("not_supported", "not supported ({})")):
            for reason, options in entries.get(name, {}).items():
                self.answers.update(dict.fromkeys(options, Answer(verdict.format(reason), remark=reason)))
        for name in ("meaning", "default", "default_in_prompts", "default_requires"):
            getattr(self, name).update(entries.get(name, {}))
        for name in ("values", "computed"):
            by_key = {find_key_in_section(key, schema): value for key, value in entries.get(name, {}).items()}
            getattr(self, name).update({key: value for key, value in by_key.items() if exists(key, schema)})


@dataclass(frozen=True)
class Project:
    """Programs and options of another project."""

    name: str
    programs: dict[str, str]  # {name or pattern: "COMMAND KEY=VALUE ..."}
    other_programs: dict[str, str]  # {name or pattern: why the program is not converted}
    program_defaults: dict[str, JsonObject]  # {name or pattern: defaults of options}
    tables: dict[str, KeyTable]  # by command of this project


@cache
def load_project(prefix: str) -> Project:
    """Load the file of a project (PROJECTS). Entries of a command replace entries of `shared`, and entries of a file
    replace entries of its `base`."""
    layers = [_read_file(prefix)]
    if base := layers[0].get("base"):
        layers.insert(0, _read_file(base))
    tables: dict[str, KeyTable] = {}
    for command in (name for name in COMMANDS if name in layers[-1]):
        tables[command] = KeyTable()
        for layer in layers:
            tables[command].add(layer.get("shared", {}), COMMANDS[command])
            tables[command].add(layer.get(command) or {}, COMMANDS[command])
    names = ("programs", "other_programs", "program_defaults")
    programs, others, defaults = (layers[-1].get(name, {}) for name in names)
    return Project(PROJECTS[prefix], programs, others, defaults, tables)


def _read_file(prefix: str) -> JsonObject:
    file = resources.files("alphaapollo.config").joinpath(f"{prefix}_keys.yaml")
    return {**yaml.safe_load(file.read_text(encoding="utf-8"))}


def exists(key: str, schema: type[BaseModel]) -> bool:
    """Return whether a command has a key or a section of this name, or a map that may have an entry of this name."""
    return key in list_keys(schema) or key in list_sections(schema) or bool(find_map_key_of_entry(key, schema))


def find_key_in_section(key: str, schema: type[BaseModel]) -> str:
    """Return the name that a key of fine-tuning has in a command: actor_rollout_ref.actor.optim.lr is the name of
    optim.lr in main_ppo."""
    sections = ("", "actor_rollout_ref.actor.", "actor_rollout_ref.")
    return next((section + key for section in sections if exists(section + key, schema)), key)


def find_answer(project: str, name: str, *schemas: type[BaseModel]) -> Answer | None:
    """Return what an option of another project is in the commands with these schemas; None if it is not listed.

    Precedence: names over patterns, then schemas that have the key's section over others, then longer over shorter
    patterns.
    """
    answers: dict[tuple[bool, bool, int, str], Answer] = {}  # by precedence
    for schema in schemas:
        has_section = name.split(".")[0] in list_sections(schema)
        table = load_project(project).tables.get(_get_command_name(schema), KeyTable())
        for pattern, answer in table.answers.items():
            if fnmatchcase(name, pattern) or (pattern.endswith(".*") and fnmatchcase(name, pattern[:-2])):
                answers.setdefault(("*" not in pattern, has_section, len(pattern), answer.status), answer)
    return answers[max(answers)] if answers else None


def find_key_status(project: str, name: str, *schemas: type[BaseModel]) -> str | None:
    """Return the status of `find_answer`, e.g. `renamed to env.max_steps`."""
    answer = find_answer(project, name, *schemas)
    return answer.status if answer else None


def find_option_status(name: str, *schemas: type[BaseModel]) -> str | None:
    """Return what a name, or its last part, is in TRL, OpenRLHF or ms-swift: `an option of TRL, renamed to optim.lr`.

    The last part is not looked up if a key of the schemas has it, because then only the section is wrong."""
    last = name.rpartition(".")[2]
    has_last = any(key.rpartition(".")[2] == last for schema in schemas for key in list_keys(schema))
    names = [name] if has_last else [name, last]
    others = [project for project in PROJECTS if project != "verl"]
    pairs = [(project, find_key_status(project, option, *schemas)) for option in names for project in others]
    return next((f"an option of {PROJECTS[project]}, {status}" for project, status in pairs if status), None)


def _get_command_name(schema: type[BaseModel]) -> str:
    """Return the command whose configuration has this schema; "" for the settings of an environment."""
    return next((command for command, known in COMMANDS.items() if known is schema), "")
