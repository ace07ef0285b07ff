"""Find the training commands in a file of another project: a shell script, a Python script of TRL, or a YAML file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path

from alphaapollo.config.key_tables import load_project
from alphaapollo.config.keys import flatten_maps, format_value
from alphaapollo.plugins.port.python_calls import list_config_calls
from alphaapollo.plugins.port.shell import (
    MACHINE_VALUE,
    MAX_SOURCE,
    UNKNOWN,
    Command,
    list_script_commands,
    remove_shell_marks,
)
from alphaapollo.utils.disk import parse_yaml

VERL = re.compile(r"(?:.*[./])?(?:main_\w+|(?:fsdp_)?sft_trainer|fully_async_main|\w+_main_ppo|grpo_main)(?:\.py)?")
VERL_COMMANDS = {"sft": "main_sft", "main_generation": "main_generation", "main_eval": "main_eval"}
WORD = re.compile(r"(?:\+\+?|~)?(\w[\w.@/-]*)=(.*)", re.DOTALL)
SHELL_IN_DOCSTRING = re.compile(
    r"^[ \t]*(?:\w+=\S+ )*(?:accelerate launch|python3?|trl|torchrun)\b(?:.*\\\n)*.*$", re.MULTILINE
)
LAUNCHER_OPTIONS = {name: name for name in ("nproc_per_node", "nnodes", "num_processes")}
LAUNCHER_OPTIONS |= {"num_gpus": "nproc_per_node", "num_nodes": "nnodes"}  # of deepspeed


@dataclass(frozen=True)
class ForeignCommand:
    """Command of another project's program, or a configuration in a Python or YAML file."""

    project: str  # of PROJECTS
    program: str  # name of the program in its project, e.g. "swift rlhf dpo" or "grpo"
    place: str  # e.g. "line 7: swift rlhf dpo"
    values: Mapping[str, str]  # options and their values
    command: str = ""  # of this project, with `KEY=VALUE`s; empty if the program is not converted
    reason: str = ""  # why it is not
    notes: tuple[str, ...] = ()
    is_known: bool = True  # whether the project has the program


def list_foreign_commands(source: str, path: str, variables: dict[str, str]) -> list[ForeignCommand]:
    """Return the commands in a file. Raises ValueError if the file, or a value of a command, cannot be read."""
    suffix, trainer = Path(path).suffix, variables.get("trainer", "")
    if suffix in (".yaml", ".yml", ".json"):
        return [_read_config_file(source, path, trainer)]
    if suffix == ".py":
        given = {LAUNCHER_OPTIONS[name]: variables[name] for name in LAUNCHER_OPTIONS if name in variables}
        calls = [
            find_program("trl", call.trainer, f"line {call.line}: {call.name}", {**given, **call.values}, call.notes)
            for call in list_config_calls(source, path)
        ]
        if calls:
            return calls
        source = "\n".join(SHELL_IN_DOCSTRING.findall(ast.get_docstring(ast.parse(source)) or ""))
    found = list[ForeignCommand]()
    for command in list_script_commands(source, path, variables):
        if one := _recognize(command, Path(path)):
            _check_values_are_known(command, path)
            notes = (f"{command.condition}: remove it if it is not what you run",) if command.condition else ()
            found.append(replace(one, notes=one.notes + notes))
    texts = "".join(text for one in found for text in one.values.values())
    if missing := sorted({f"${number}" for number in re.findall("\2\\${(\\d+)}\3", texts)}):
        raise ValueError(
            f"{path} reads {', '.join(missing)}, its arguments. Add those of a run: port {path} -- ARG ..."
        )
    return found


def _check_values_are_known(command: Command, path: str) -> None:
    """Raise ValueError if words of a command depend on branches, loops or functions of its script."""
    if reasons := [*dict.fromkeys(UNKNOWN.findall(" ".join(command.words)))]:
        names = [f"{match[1]}=VALUE" for reason in reasons if (match := re.match(r"(\w+) is set", reason))]
        fix = f"Set what a run has: port {path} {' '.join(names)}" if names else "Write its value into a copy"
        raise ValueError(
            f"{path}: line {command.line}: {'; '.join(reasons)}. port does not run the script. {fix}, or run "
            f"bash -x {path} and port the command that it prints."
        )


def find_program(
    project: str, program: str, place: str, values: Mapping[str, str], notes: Iterable[str] = ()
) -> ForeignCommand:
    """Look up a program of a project; the first pattern counts."""
    known = load_project(project)
    commands = [one for pattern, one in known.programs.items() if fnmatchcase(program, pattern)]
    reasons = [one for pattern, one in known.other_programs.items() if fnmatchcase(program, pattern)]
    unknown = f"an unknown program; those of {known.name} are {', '.join(known.programs)}"
    reason = "" if commands else next(iter(reasons), unknown)
    return ForeignCommand(
        project, program, place, values, next(iter(commands), ""), reason, tuple(notes), bool(commands or reasons)
    )


def _recognize(command: Command, script: Path) -> ForeignCommand | None:
    """Return the command of a project's program; None for another command."""
    line, words, _ = command
    names = [word.rpartition("/")[2] for word in words]
    if {"pip", "pip3", "git", "echo", "cd"} & {*names[:3]}:
        return None
    for place, (word, name, following) in enumerate(zip(words, names, [*words[1:], ""], strict=True)):
        label = f"line {line}: {word}"
        if VERL.fullmatch(word) and (word.endswith(".py") or words[max(0, place - 1)] == "-m"):
            return _read_verl_command(words, place, label, script)
        if match := re.search(r"openrlhf[./]cli[./](\w+)", word):
            return find_program("openrlhf", match[1].removesuffix(".py"), label, _read_options(words, place, script))
        if (name in ("swift", "megatron") and re.fullmatch(r"[a-z-]+", following)) or "swift/cli/" in word:
            return _read_swift_command(words, place, f"{label} {following}", script)
        if name == "trl" and following:
            return find_program("trl", following, f"{label} {following}", _read_options(words, place + 1, script))
        stem = name.removesuffix(".py").removeprefix("trl.scripts.")
        if stem != name and (found := find_program("trl", stem, label, _read_options(words, place, script))).is_known:
            return found
    return None


def _read_verl_command(words: list[str], place: int, label: str, script: Path) -> ForeignCommand:
    module = words[place]
    command = next((ours for part, ours in VERL_COMMANDS.items() if part in module), "main_ppo")
    values = {match[1]: match[2] for word in words[place:] if (match := WORD.fullmatch(word))}
    pairs = re.findall(r"(?<![\w-])--([\w-]+)(?:=| (?!--))(\S*)", " ".join(words))
    options = {name.replace("-", "_"): text for name, text in pairs}
    notes = []
    if name := re.sub(r"^ppo_.*|\.yaml$", "", options.get("config_name", "")):
        yaml_keys = _read_yaml_keys(Path(options.get("config_path", ""), f"{name}.yaml"), script)
        notes.append(
            f"--config-name={name}: {'its keys are below' if yaml_keys else 'not found; add its keys as KEY=VALUE'}"
        )
        values = yaml_keys | values
    for option, key in (("nproc_per_node", "trainer.n_gpus_per_node"), ("nnodes", "trainer.nnodes")):
        if MACHINE_VALUE.search(text := options.get(option, "")) or text.isdigit():
            values[key] = text
    return ForeignCommand("verl", module, label, values, command, notes=tuple(notes))


def _read_swift_command(words: list[str], place: int, label: str, script: Path) -> ForeignCommand:
    """Read `swift rlhf ...`, `megatron sft ...` or `torchrun ... sft.py ...`."""
    word = words[place].rpartition("/")[2]
    is_file = word.endswith(".py")
    tool = "megatron" if "megatron" in words[place] else "swift"
    verb = word.removesuffix(".py") if is_file else words[place + 1]
    values = _read_options(words, place + (not is_file), script)
    values |= {
        name.lower(): match[2]
        for one in words
        if (match := WORD.fullmatch(one)) and (name := match[1]) in ("NPROC_PER_NODE", "NNODES")
    }
    return _name_swift_program(tool, verb, label, values)


def _name_swift_program(tool: str, verb: str, label: str, values: dict[str, str]) -> ForeignCommand:
    program = " ".join([tool, verb, *([values.get("rlhf_type", "dpo")] if verb == "rlhf" else [])])
    return find_program("swift", program, label, values)


def _read_options(words: list[str], place: int, script: Path) -> dict[str, str]:
    """Return the options after the program, those of a YAML file that they name, and the launcher's processes."""
    options = parse_options(words[place + 1 :])
    following = words[place + 1 : place + 2]
    file = options.get("config") or next((word for word in following if word.endswith((".yaml", ".yml", ".json"))), "")
    return _read_launcher(words[:place], script) | (_read_yaml_keys(Path(file), script) if file else {}) | options


def _read_launcher(words: list[str], script: Path) -> dict[str, str]:
    """Return the numbers of processes in the options of torchrun, deepspeed or accelerate, which have one value each,
    or in accelerate's file."""
    found: dict[str, str] = {}
    for word, following in pairwise([*words, ""]):
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            found[name[2:].replace("-", "_")] = value if equals else following
    file = found.get("config_file", "")
    found = (_read_yaml_keys(Path(file), script) if file else {}) | found
    return {LAUNCHER_OPTIONS[name]: text for name, text in found.items() if name in LAUNCHER_OPTIONS}


def parse_options(words: Iterable[str]) -> dict[str, str]:
    """Return {option: value} for `--option value`, `--option=value` and `--option`; several values are `[a,b]`.

    >>> parse_options(["--lr", "1e-5", "--packing", "--target-modules", "q_proj,", "v_proj"])
    {'lr': '1e-5', 'packing': 'true', 'target_modules': '[q_proj,v_proj]'}
    """
    found: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = [value] if equals else []
        elif name and not re.fullmatch(r"N(?:PROC_PER_NODE|NODES)=.*", word):
            found[name].append(word)
    return {name: format_text_value(values) for name, values in found.items()}


def format_text_value(values: list[str]) -> str:
    """Return the value of an option with these words: true for none, the word, or a list."""
    normal = {"True": "true", "False": "false", "None": "null"}
    words = [normal.get(value, value) for value in values]
    if len(words) > 1 or (words and words[0].endswith(",")):
        words = [word.strip().rstrip(",") for word in words]
    return f"[{','.join(words)}]" if len(words) > 1 else words[0] if words else "true"


def _read_config_file(source: str, path: str, trainer: str) -> ForeignCommand:
    """Read a YAML file of TRL's command line (`trl grpo --config`) or of ms-swift (`swift rlhf FILE`)."""
    values = _flatten_yaml(source, path)
    if "model_name_or_path" in values or "dataset_name" in values:
        if not trainer:
            raise ValueError(f"{path}: which trainer of TRL reads it? Add it, e.g. port {path} trainer=sft.")
        return find_program("trl", trainer, f"a configuration of trl {trainer}", values)
    if "model" in values or "rlhf_type" in values:
        tool = "megatron" if {"micro_batch_size", "global_batch_size"} & values.keys() else "swift"
        verb = trainer or ("rlhf" if "rlhf_type" in values else "sft")
        return _name_swift_program(tool, verb, f"a configuration of {tool} {verb}", values)
    raise ValueError(
        f"{path}: no key of TRL (model_name_or_path, dataset_name) or ms-swift (model, rlhf_type). For verl, port the "
        "script that names the file."
    )


def _read_yaml_keys(file: Path, script: Path) -> dict[str, str]:
    """Read the keys of a YAML file, searched below the working directory and the folders above the script."""
    text = str(file)
    relative = MACHINE_VALUE.split(text)[-1].strip("/") if MACHINE_VALUE.search(text) else text
    files = (root / relative for root in (Path(), *script.resolve().parents))
    found = next(filter(Path.is_file, files), None)
    return _flatten_yaml(found.read_text(encoding="utf-8"), str(found)) if found else {}


def _flatten_yaml(source: str, path: str) -> dict[str, str]:
    """Return the keys of a YAML file, without Hydra's own keys. The sections `train` and `rollout` of ms-swift have
    options of the command."""
    try:
        if len(source) > MAX_SOURCE:
            raise ValueError(f"it has over {MAX_SOURCE} characters")
        found = parse_yaml(source)
    except ValueError as error:
        raise ValueError(f"{path}: {error}. Correct the file.") from None
    flat = flatten_maps(found) if isinstance(found, dict) else {}
    return {  # train.gpus keeps its section: convert.py reads it by its full name
        re.sub(r"^(?:train|rollout)\.(?!gpus$)(?=[a-z_]+$)", "", key): remove_shell_marks(format_value(value))
        for key, value in flat.items()
        if not key.startswith(("defaults", "hydra"))
    }
