"""Convert the verl commands of a shell script to alphaapollo commands, with a comment at each difference.

RULES lists the keys whose values need a conversion. A rule receives the value and all keys of verl's command.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import resources
from itertools import pairwise
from pathlib import Path

import yaml
from pydantic import BaseModel

from alphaapollo.config.errors import ConfigError
from alphaapollo.config.keys import COMMANDS, find_map_key_of_entry, format_value, list_keys, list_sections
from alphaapollo.config.load import check_override, flatten_maps
from alphaapollo.config.renamed_keys import describe_rename
from alphaapollo.config.verl import find_verl_key_status, load_verl_key_tables

ArgumentLines = dict[str, tuple[str, str]]  # key -> (`KEY=VALUE` or empty, comment)
VerlValues = Mapping[str, str]  # keys and values of verl's command
ConvertedKeys = tuple[dict[str, str], str]  # alphaapollo's keys with values, and a remark for the comment

PROGRAM = re.compile(r"(?:.*[./])?(?:main_\w+|(?:fsdp_)?sft_trainer|fully_async_main|\w+_main_ppo|grpo_main)(?:\.py)?")
OTHER_PROGRAMS = {"sft": "main_sft", "main_generation": "main_generation", "main_eval": "main_eval"}
WORD = re.compile(r"(?:\+\+?|~)?(\w[\w.@/-]*)=(.*)", re.DOTALL)
HEADER = "#!/usr/bin/env bash\n# {}, ported to alphaapollo. Check it with trainer.dry_run=True; see docs/verl.md.\n"
OFFLINE = "\n# To send to {0}, log in and remove the next line.\nexport {1}_MODE=${{{1}_MODE:-offline}}\n"


def port_script(source: str, path: str, arguments: Iterable[str] = ()) -> str:
    """Convert the shell script `source` to one with alphaapollo commands. Raises ValueError if it does not run verl.

    arguments: `KEY=VALUE` adds a key to verl's command, `NAME=VALUE` sets a variable that the script reads.
    """
    pairs = {match[1]: match[2] for word in arguments if (match := WORD.fullmatch(word))}
    commands, notes = list_script_commands(source, path, {name: pairs[name] for name in pairs if "." not in name})
    new_keys = {key: value for key, value in pairs.items() if "." in key}
    ported = "".join(line + "\n" for command in commands for line in _port_command(command, new_keys, Path(path)))
    if not ported:
        raise ValueError(
            f"{path}: the script runs no verl program, such as python3 -m verl.trainer.main_ppo. If the command is "
            "inside an `if`, set the variables of its condition: port SCRIPT NAME=VALUE."
        )
    header = HEADER.format(Path(path).name) + "".join(f"# {note}\n" for note in notes)
    uploading = [name for name in ("wandb", "swanlab") if re.search(f"trainer.logger=.*{name}", ported)]
    return header + "".join(OFFLINE.format(name, name.upper()) for name in uploading) + ported


def _port_command(command: Command, new_keys: dict[str, str], script: Path) -> Iterator[str]:
    """Yield the lines of the alphaapollo command for a verl command; no lines if the command does not run verl."""
    line, words = command
    modules = [word for last, word in pairwise(words) if last == "-m" or word.endswith(".py")]
    if not (module := next(filter(PROGRAM.fullmatch, modules), "")):
        return
    program = next((ours for part, ours in OTHER_PROGRAMS.items() if part in module), "main_ppo")
    values = {match[1]: match[2] for word in words[words.index(module) :] if (match := WORD.fullmatch(word))} | new_keys
    pairs = re.findall(r"--([\w-]+)(?:=| (?!--))(\S*)", " ".join(words))
    options = {name.replace("-", "_"): text for name, text in pairs}
    yield f"\n# line {line}: {module}"
    if name := re.sub(r"^ppo_.*|\.yaml$", "", options.get("config_name", "")):
        yaml_keys = _read_yaml_keys(options.get("config_path", ""), f"{name}.yaml", script)
        yield f"# --config-name={name}: {'its keys are below' if yaml_keys else 'not found; add its keys as KEY=VALUE'}"
        values = yaml_keys | values
    for option, key in (("nproc_per_node", "trainer.n_gpus_per_node"), ("nnodes", "trainer.nnodes")):
        if UNKNOWN.search(text := options.get(option, "")) or text.isdigit():
            values[key] = text
    lines = translate_keys(values, program).values()
    if unknown := {text for word, _ in lines for text in UNKNOWN.findall(word)}:
        yield f"# from the environment, or known only at run time: {', '.join(sorted(unknown))}"
    yield "arguments=("
    for word, comment in lines:
        comment = "# " + " ".join(UNKNOWN.sub(r"\1", comment).split()) if comment else ""
        yield "    " + "  ".join(part for part in (_quote_for_shell(word), comment) if part)
    yield f')\npython -m alphaapollo.trainer.{program} "${{arguments[@]}}" "$@"'


def _read_yaml_keys(config_path: str, file_name: str, script: Path) -> dict[str, str]:
    """Read the keys of verl's YAML file, searched below the working directory and the folders above the script."""
    folder = UNKNOWN.split(config_path)[-1].strip("/") if UNKNOWN.search(config_path) else config_path
    files = (root / folder / file_name for root in (Path(), *script.resolve().parents))
    file = next(filter(Path.is_file, files), None)
    found = flatten_maps(yaml.safe_load(file.read_text(encoding="utf-8"))) if file else {}
    return {key: format_value(value) for key, value in found.items() if not key.startswith(("defaults", "hydra"))}


def translate_keys(values: VerlValues, program: str) -> ArgumentLines:
    """Translate verl's keys to commented arguments of `program`; for main_ppo, add verl's defaults if they differ."""
    schema, lines = COMMANDS[program], ArgumentLines()
    for key, value in values.items():
        words, remark = _convert_key(key, value, values, program)
        if remark and not words:
            lines[f"# {key}"] = ("", f"{key}={value}: {remark}")
        for ours, text in words.items():
            lines[ours] = _format_argument(ours, text, remark, schema)
            remark = ""
    tables = load_verl_key_tables()["main_ppo"]
    for key, value in (tables["default"] | tables["default_in_prompts"]).items() if program == "main_ppo" else ():
        other, verl_default, needed = tables["default_requires"].get(key, ("", "", ""))
        words, _ = _convert_key(key, format_value(value), {**values, key: format_value(value)}, program)
        differs = words.get(key) != format_value(list_keys(schema)[key].default)
        if key not in values and differs and values.get(other, verl_default).lower() in needed.split("|"):
            lines.setdefault(key, (f"{key}={words[key]}", "verl's default"))
    return lines


def _convert_key(key: str, value: str, values: VerlValues, program: str) -> ConvertedKeys:
    schema, renamed_values = COMMANDS[program], load_verl_key_tables()["main_ppo"]["values"]
    if key in RULES and (program == "main_ppo" or key.startswith("trainer.")):
        return RULES[key](value, values)
    known = list_keys(schema).get(key)
    if value == "null" and known is not None and "null" not in known.type:
        return {}, "the default here"
    if known or key in list_sections(schema) or find_map_key_of_entry(key, schema):
        ours = str(renamed_values.get(key, {}).get(value, value))
        return {key: ours}, f"was {value}" if ours != value else ""
    status = describe_rename(key) or find_verl_key_status(key, schema) or "not a known key of verl"
    if not status.startswith("renamed to "):
        return {}, status
    ours, _, remark = status.removeprefix("renamed to ").partition(" ")
    return ({}, f"{ours} keeps its default") if value == "null" else ({ours: value}, f"was {key} {remark}".rstrip())


def _format_argument(key: str, value: str, remark: str, schema: type[BaseModel]) -> tuple[str, str]:
    """Return `KEY=VALUE` and its comment; only a comment if the key does not accept the value's type."""
    try:
        if not UNKNOWN.search(value):
            check_override(schema, f"{key}={value}")
    except ConfigError as error:
        if wrong := [line for line in error.errors if line.startswith(f"{key}: expected")]:
            return "", f"{key}={value}: left out. {wrong[0]}"
    return f"{key}={value}", remark


def _quote_for_shell(word: str) -> str:
    """Quote a word for the shell, except parts such as `${HOME}` that the shell must expand at run time."""
    parts = UNKNOWN.split(word)  # known, unknown, known, ...
    parts[::2] = [re.sub(r'([\\"`$])', r"\\\1", part) for part in parts[::2]]
    return f'"{"".join(parts)}"' if len(parts) > 1 else shlex.quote(word) if word else ""


ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
CORRECTION, TURNS, VALIDATION = "algorithm.rollout_correction", f"{ROLLOUT}.multi_turn", f"{ROLLOUT}.val_kwargs"


def _read_number(values: VerlValues, key: str, default: int) -> int:
    return int(values[key]) if values.get(key, "").isdigit() else default


def _convert_mini_batch_size(value: str, values: VerlValues) -> ConvertedKeys:
    key, n = f"{ACTOR}.ppo_mini_batch_size", _read_number(values, f"{ROLLOUT}.n", 1)
    if not value.isdigit():
        return {key: value}, f"counts trajectories here, prompts in verl: multiply it by rollout.n={n}"
    return {key: str(int(value) * n)}, f"{value} prompts x rollout.n={n}: here it counts trajectories" if n > 1 else ""


def _convert_truncation(value: str, values: VerlValues) -> ConvertedKeys:
    if values.get("data.filter_overlong_prompts", "").lower() == "true":
        return {"data.truncation": "drop"}, "was data.filter_overlong_prompts=True"
    return {"data.truncation": values.get("data.truncation", "error").replace("middle", "left")}, ""


def _convert_validation_temperature(value: str, values: VerlValues) -> ConvertedKeys:
    is_greedy = values.get(f"{VALIDATION}.do_sample", "").lower() == "false"
    temperature = "0" if is_greedy else values.get(f"{VALIDATION}.temperature", "1.0")
    return {f"{VALIDATION}.temperature": temperature}, "was val_kwargs.do_sample=False: greedy" if is_greedy else ""


def _convert_tensor_parallel_size(value: str, values: VerlValues) -> ConvertedKeys:
    gpus = _read_number(values, "trainer.n_gpus_per_node", 8) * _read_number(values, "trainer.nnodes", 1)
    size = str(min(int(value), gpus)) if value.isdigit() else value
    remark = f"was {value}, but there are {gpus} GPUs" if size != value else ""
    return {f"{ROLLOUT}.tensor_model_parallel_size": size}, remark


def _convert_logger(value: str, values: VerlValues) -> ConvertedKeys:
    names = re.findall(r"\w+", value)
    kept = [name for name in names if name in ("console", "tensorboard", "wandb", "mlflow", "trackio", "swanlab")]
    others = ", ".join(name for name in names if name not in kept)
    return {"trainer.logger": f"[{','.join(kept or ['console'])}]"}, f"not supported: {others}" if others else ""


def _convert_target_kl(value: str, values: VerlValues) -> ConvertedKeys:
    length, is_number = _read_number(values, "data.max_response_length", 512), re.fullmatch(r"[\d.]+", value)
    remark = f"per sequence here, {value} per token in verl: multiplied by {length}; better use the mean length"
    return {"algorithm.kl_ctrl.target_kl": f"{float(value) * length:g}" if is_number else value}, remark


def _convert_output_dir(value: str, values: VerlValues) -> ConvertedKeys:
    run = "/".join(values.get(f"trainer.{name}", "") for name in ("project_name", "experiment_name"))
    return {"trainer.output_dir": value.removesuffix(f"/{run}")}, "without project_name/experiment_name"


def _convert_rollout_is(value: str, values: VerlValues) -> ConvertedKeys:
    weights, mask = (values.get(f"{CORRECTION}.rollout_{name}", "null") for name in ("is", "rs"))
    threshold = values.get(f"{CORRECTION}.rollout_{'rs' if weights == 'null' else 'is'}_threshold", "null")
    levels = load_verl_key_tables()["main_ppo"]["values"][f"{CORRECTION}.rollout_rs"]
    cap = values.get(f"{ACTOR}.tis_imp_ratio_cap", "-1")
    if weights != "null":
        words = {"method": "tis", "level": weights, "high": threshold}
    elif mask in levels:
        low, _, high = threshold.strip("'\"").rpartition("_")
        if mask.endswith("_k1"):  # verl's bounds are those of 1 / rho; one bound is both
            low, high = _invert(high), _invert(low) if low else high
        words = {"method": "mask", "level": levels[mask], "low": low or "null", "high": high}
    elif cap not in ("-1", "null"):
        words = {"method": "tis", "level": "token", "high": cap}
    else:
        return {}, "" if value == "null" else f"not supported; {CORRECTION}.method=mask has other levels"
    remark = "only one correction is applied: rollout_is, else rollout_rs, else tis_imp_ratio_cap"
    if words["method"] == "mask":
        remark += f"; was {threshold}; kept tokens are also weighted by rho, which verl does not do"
    return {f"{CORRECTION}.{name}": text for name, text in words.items() if text != "null"}, remark


def _invert(bound: str) -> str:
    return f"{1 / float(bound):.6g}" if re.fullmatch(r"[\d.]*[1-9][\d.]*", bound) else bound


def _convert_multi_turn(value: str, values: VerlValues) -> ConvertedKeys:
    if values.get(f"{TURNS}.enable", "").lower() != "true":
        return {}, "episodes have one turn"
    limits = (values.get(f"{TURNS}.max_{limit}turns", "null") for limit in ("assistant_", "user_", ""))
    words = {"env_name": "informal_math", "max_steps": next((limit for limit in limits if limit != "null"), "10")}
    words |= {"action_format": "chat_template", "tool_parser": values.get(f"{TURNS}.format", "hermes")}
    remark = f"was {TURNS}.enable: an environment with tools, which the chat template calls"
    return {f"env.{name}": text for name, text in words.items()}, remark


RULES: dict[str, Callable[[str, VerlValues], ConvertedKeys]] = {
    f"{ACTOR}.ppo_mini_batch_size": _convert_mini_batch_size,
    f"{ACTOR}.tis_imp_ratio_cap": _convert_rollout_is,
    f"{ROLLOUT}.tensor_model_parallel_size": _convert_tensor_parallel_size,
    **{f"{CORRECTION}.rollout_{name}": _convert_rollout_is for name in ("is", "is_threshold", "rs", "rs_threshold")},
    **{
        f"{TURNS}.{name}": _convert_multi_turn
        for name in ("enable", "format", "max_turns", "max_user_turns", "max_assistant_turns")
    },
    **{f"{VALIDATION}.{name}": _convert_validation_temperature for name in ("do_sample", "temperature")},
    "algorithm.kl_ctrl.target_kl": _convert_target_kl,
    "data.truncation": _convert_truncation,
    "data.filter_overlong_prompts": _convert_truncation,
    "trainer.logger": _convert_logger,
    "trainer.default_local_dir": _convert_output_dir,
}


Command = tuple[int, list[str]]  # (line number in the script, words of the command)
UNKNOWN = re.compile("\2([^\3]*)\3")  # text of a value that depends on the machine, e.g. ${HOME}
QUOTED = r"""\\.|"(?:\\.|[^"\\])*"|'[^']*'"""
KEPT = rf"""{QUOTED}|(?<!\S)\#.*|\(\(.*?\)\)|\[\[.*?\]\]|<<-?\s*['"]?(?P<end>\w+)['"]?\n(?s:.*?)\n\s*(?P=end)\n"""
TARGET = rf"""(?:{QUOTED}|>\([^()]*\)|\$\([^()]*\)|[^\s;&|()<>"'])+"""
REWRITES = {  # pattern -> replacement, for what stubs.sh cannot define
    r"(?:\d|&)?>>?[ \t]*/dev/null": "",  # in the sandbox, a redirection and its command would fail
    rf"(?P<keep>{KEPT})|(?<![\w$<>=-])(?:\d|&)?>>?[ \t]*{TARGET}": r"\g<keep>",
    r"""(["']?)(?:[$~./\w][\w./${}~-]*)?/(python[\d.]*|torchrun)\1(?=[\s"'};)])""": r"\2",
    r"\[\[ (!? ?-[defrswx] \S+) \]\]": r"[ \1 ]",
    r"\$\{BASH_SOURCE(?:\[0\])?[^}]*\}|\$BASH_SOURCE\b": "$0",
    r"\$\{(\w+):?\?[^}]*\}": r"${\1}",
    r"\$\(\(((?:[^()=+-]|[+-](?![+-])|\([^()]*\))*)\)\)": r'$(arithmetic "\1")',
}


def list_script_commands(source: str, path: str, variables: dict[str, str]) -> tuple[list[Command], list[str]]:
    """Return the commands that the script `source` would run if only `variables` were set, and bash's error messages.

    A value that depends on the machine is kept as text between the characters \\2 and \\3, e.g. `\\2${HOME}\\3/data`.
    Raises ValueError if bash cannot parse the script, or if this machine has no sandbox.
    """
    defaulted = re.findall(r"\$\{(\w+):?[-=+]", re.sub(r"(?<!\S)#.*", "", source))
    for pattern, replacement in REWRITES.items():
        source = re.sub(pattern, replacement, source)
    source = re.sub(r"\[\[? .*? \]", lambda test: re.sub(r"\$(\w+)|\$\{(\w+)\}", r"${\1\2-}", test[0]), source)
    for name in variables:  # the script's assignments must not change them
        source = re.sub(rf"(?m)(^|[;&|]|\b(?:then|do|else|export|local)\b)(\s*){name}(\+?=)", r"\1\2_\3", source)
    known, unset = dict(variables), {""}
    while unset:
        commands, errors = _run_script_in_sandbox(source, path, known)
        unset = set(re.findall(r"line \d+: \$?(\w+)(?:\[.*\])?: unbound variable", errors)) - known.keys()
        known |= {name: "" if name in defaulted else f"\2${{{name}}}\3" for name in unset}
    notes = re.findall(rf"(?m)^(?:{re.escape(path)}: |environment: )?(?:-c: )?((?:line \d+: |stopped).+)", errors)
    if syntax_errors := [note for note in notes if re.search("syntax error near|unexpected (?:EOF|end)", note)]:
        raise ValueError(f"{path}: {syntax_errors[0]}. Correct the script.")
    return commands, list(dict.fromkeys(UNKNOWN.sub(r"\1", note) for note in notes))


def _run_script_in_sandbox(source: str, path: str, variables: dict[str, str]) -> tuple[list[Command], str]:
    """Run the script with bash in the sandbox. Returns the recorded commands and bash's error messages."""
    stubs = (resources.files("alphaapollo.config.port") / "stubs.sh").read_text(encoding="utf-8")
    stubs += "".join(f"{name}={shlex.quote(value)}\n" for name, value in variables.items() if not name.isdigit())
    last = max((int(name) for name in variables if name.isdigit()), default=0)
    arguments = [path, *(variables.get(str(number), "") for number in range(1, last + 1))]
    command = [sys.executable, "-m", "alphaapollo.tools.sandbox.bash", "-u", "-f", "-c", stubs + source, *arguments]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    output, errors = (text.decode(errors="replace").replace("\4", " ") for text in (done.stdout, done.stderr))
    if done.returncode == 125:
        raise ValueError(errors.strip())
    first, commands = stubs.count("\n"), dict[str, Command]()
    for process, line, word in re.findall("(\\d+)\37(\\d+)\37([^\0]*)\0", output):
        commands.setdefault(process, (int(line) - first, []))[1].append(word)
    return list(commands.values()), re.sub(r"line (\d+)", lambda found: f"line {int(found[1]) - first}", errors)
