"""verl's keys and values as ours: a line for each, with a comment where it is not the same."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import BaseModel

from alphaapollo.config.errors import ConfigError
from alphaapollo.config.keys import COMMANDS, accepted_keys, in_map, plain, sections
from alphaapollo.config.load import checked_value, flat
from alphaapollo.config.port.expansion import MARK, is_known
from alphaapollo.config.port.shell import Command, read_script
from alphaapollo.config.port.values import CONVERTERS, DTYPES, OF_EVERY_PROGRAM, ROLLOUT, Converted, Values
from alphaapollo.config.schema import Config
from alphaapollo.config.verl import verl_tables, verl_verdict

PROGRAM = re.compile(r"(?:.*[./])?(?:main_\w+|(?:fsdp_)?sft_trainer|fully_async_main|\w+_main_ppo|grpo_main)(?:\.py)?")
WANDB = "export WANDB_MODE=${WANDB_MODE:-offline}"
WORD = re.compile(r"(?:\+\+?|~)?([\w.@/-]+)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class Line:
    """A word of our command with what is said about it; no word: only the comment."""

    word: str
    comment: str = ""


def port(source: str, path: str, given: Iterable[str] = ()) -> str:
    """Our shell script for verl's. ValueError: it has no command that trains, generates or evaluates.

    given: `KEY=VALUE` is added to the command, as by `"$@"`; `NAME=VALUE` sets a variable that the script reads.
    """
    pairs = [match.groups() for word in given if (match := WORD.fullmatch(word))]
    variables = {name: value for name, value in pairs if "." not in name}
    added = [f"{key}={value}" for key, value in pairs if "." in key]
    reader = read_script(source, variables, path)
    found = [(command, at) for command in reader.commands if (at := _program_at(command.words)) is not None]
    if not found:
        raise ValueError(
            f"{path}: no command that starts a program of verl's (python3 -m verl.trainer.main_ppo, say) was found. "
            "Where a condition hides it, set its variable: port SCRIPT NAME=VALUE."
        )
    text = [
        "#!/usr/bin/env bash",
        f"# {Path(path).name}, written for alphaapollo by `python -m alphaapollo.config port`. Check it with",
        "# trainer.dry_run=True; docs/verl.md says what is different.",
        *(f"# {note}." for note in dict.fromkeys(reader.notes)),
    ]
    ported = [line for command, at in found for line in ["", *_ported(command, at, added, path)]]
    if any("trainer.logger=" in line and "wandb" in line for line in ported):
        text += [
            "",
            "# Into the run's folder, to be sent with `wandb sync`. To send at once, log in and take this line out.",
            WANDB,
        ]
    text += ported
    return "\n".join(text) + "\n"


def _program_at(words: list[str]) -> int | None:
    places = (at for at, word in enumerate(words) if PROGRAM.fullmatch(word) and "=" not in word)
    return next((at for at in places if words[at - 1] == "-m" or words[at].endswith(".py")), None)


def _ported(command: Command, at: int, added: list[str], path: str) -> Iterator[str]:
    module = command.words[at]
    name = _ours(module)
    options, values, groups = _read_words([*command.words[at + 1 :], *added])
    lines = [Line("", f"{word}: FSDP2 is the only backend") for word in groups]
    config_name = options.get("config-name", "").removesuffix(".yaml")
    if config_name and not config_name.startswith("ppo_"):
        read = _own_yaml(options.get("config-path", ""), config_name, Path(path))
        lines.append(Line("", f"--config-name={config_name}: " + ("its keys are below" if read else _unread(options))))
        values = {**read, **values}
    values |= _ranks(command.words[: at - 1])
    lines += translate(values, name)
    unknown = sorted({part for line in lines for part in line.word.split(MARK)[1::2]})
    yield f"# line {command.line}: {module}"
    if unknown:
        yield f"# from the environment, or not known before it runs: {', '.join(unknown)}"
    yield "arguments=("
    for line in lines:
        comment = "# " + " ".join(line.comment.replace(MARK, "").split()) if line.comment else ""
        yield "    " + "  ".join(part for part in (quoted(line.word) if line.word else "", comment) if part)
    yield ")"
    yield f'python -m alphaapollo.trainer.{name} "${{arguments[@]}}" "$@"'


def _ours(module: str) -> str:
    if "sft" in module:
        return "main_sft"
    return next((ours for ours in ("main_generation", "main_eval") if ours in module), "main_ppo")


def _ranks(words: list[str]) -> dict[str, str]:
    """How many processes torchrun is asked for, as keys: ours start them themselves."""
    options = {name.replace("-", "_"): value for name, value in _read_words(words)[0].items()}
    keys = {"nproc_per_node": "trainer.n_gpus_per_node", "nnodes": "trainer.nnodes"}
    asked = {key: options[name] for name, key in keys.items() if name in options} if "torchrun" in words else {}
    return {key: value for key, value in asked.items() if value.isdigit() or not is_known(value)}


def _read_words(words: list[str]) -> tuple[dict[str, str], dict[str, str], list[str]]:
    """The options (`--config-name`), the keys with their values, the last counts, and the groups (`engine=fsdp`)."""
    options, values, groups = dict[str, str](), dict[str, str](), list[str]()
    for number, word in enumerate(words):
        if word.startswith("--"):
            name, sign, value = word[2:].partition("=")
            options[name] = value if sign else "".join(words[number + 1 : number + 2])
        elif match := WORD.fullmatch(word):
            if "." in match[1] and "@" not in match[1]:
                values[match[1]] = match[2]
            else:
                groups.append(word)
    return options, values, groups


def _own_yaml(folder: str, name: str, script: Path) -> dict[str, str]:
    """The keys of the YAML that the command starts from, where it is found: from here or a folder above the script."""
    relative = "/".join(folder.split(MARK)[2::2]).strip("/") if not is_known(folder) else folder
    for root in (Path(), *script.resolve().parents):
        file = root / relative / f"{name}.yaml"
        if file.is_file():
            found = yaml.safe_load(file.read_text(encoding="utf-8"))
            values = flat({key: value for key, value in found.items() if key not in ("defaults", "hydra")})
            return {key: plain(value) for key, value in values.items()}
    return {}


def _unread(options: dict[str, str]) -> str:
    where = options.get("config-path", "its folder").replace(MARK, "")
    return f"was not found ({where}); add its keys as port SCRIPT KEY=VALUE ..."


def translate(values: Values, command: str) -> list[Line]:
    """Our words for verl's keys and values, and verl's defaults where they are others than ours."""
    lines: dict[str, Line] = {}
    for key, value in values.items():
        converter = CONVERTERS.get(key) if command == "main_ppo" or key in OF_EVERY_PROGRAM else None
        converted = converter(value, values) if converter else _by_tables(key, value, COMMANDS[command])
        for number, (ours, text) in enumerate(converted.words.items()):
            lines[ours] = _checked(Line(f"{ours}={text}", converted.remark if number == 0 else ""), COMMANDS[command])
        if not converted.words and converted.remark:
            lines[f"# {key}"] = Line("", f"{key}={value}: {converted.remark}")
    if command == "main_ppo":
        for key, line in _defaults(values):
            lines.setdefault(key, line)
    return list(lines.values())


def _by_tables(key: str, value: str, schema: type[BaseModel]) -> Converted:
    if key in accepted_keys(schema) or key in sections(schema) or in_map(key, schema):
        if value == "null" and "null" not in getattr(accepted_keys(schema).get(key), "type", ""):
            return Converted({}, "nothing; the default here")
        return Converted({key: value})
    verdict = verl_verdict(key, schema)
    if verdict is None:
        return Converted({}, "not known as a key of verl's; left out")
    if not verdict.startswith("renamed to "):
        return Converted({}, verdict)
    ours, _, remark = verdict.removeprefix("renamed to ").partition(" ")
    if value == "null":
        return Converted({}, f"nothing; {ours} keeps its default")
    return Converted({ours: value}, f"was {key}" + (f" {remark}" if remark else ""))


def _checked(line: Line, schema: type[BaseModel]) -> Line:
    """A value that our key does not take becomes a comment with the reason."""
    key, _, value = line.word.partition("=")
    if key.endswith("dtype") and value in DTYPES:
        return Line(f"{key}={DTYPES[value]}", line.comment)
    if not is_known(line.word):
        return line
    try:
        checked_value(schema, line.word)
    except ConfigError as error:
        return Line("", f"{line.word}: not taken over. {' '.join(error.problems)}")
    return line


def _defaults(values: Values) -> Iterator[tuple[str, Line]]:
    """verl's defaults where ours are others, for keys that the command does not set."""
    keys = accepted_keys(Config)
    tables = verl_tables()["main_ppo"]
    default = {key: plain(value) for key, value in tables["default"].items()}
    default["actor_rollout_ref.actor.ppo_mini_batch_size"] = "256"
    if values.get("trainer.total_training_steps", "null") != "null":
        default.pop("trainer.total_epochs")
    if values.get("algorithm.kl_ctrl.type", "fixed") != "adaptive":
        default.pop("algorithm.kl_ctrl.target_kl")
    if values.get("algorithm.filter_groups.enable", "").lower() != "true":
        default.pop("algorithm.filter_groups.max_num_gen_batches")
    loss = values.get("actor_rollout_ref.actor.policy_loss.loss_mode", "vanilla")
    if loss != "vanilla":
        default.pop("actor_rollout_ref.actor.clip_ratio_c")
    if loss != "kl_cov":
        default.pop("actor_rollout_ref.actor.policy_loss.ppo_kl_coef")
    if f"{ROLLOUT}.val_kwargs.do_sample" in values:
        default.pop(f"{ROLLOUT}.val_kwargs.temperature")
    for key, value in default.items():
        converter = CONVERTERS.get(key)
        words = {key: value} if key in values or converter is None else converter(value, values).words
        if key not in values and words.get(key, plain(keys[key].default)) != plain(keys[key].default):
            yield key, Line(f"{key}={words[key]}", "verl's default")


def quoted(word: str) -> str:
    """A word for the shell; its unknown parts stay open to it."""
    if is_known(word):
        return shlex.quote(word)
    parts = word.split(MARK)
    known = [re.sub(r'([\\"`$])', r"\\\1", part) for part in parts[::2]]
    open_parts = [*parts[1::2], ""]
    return '"' + "".join(text + unknown for text, unknown in zip(known, open_parts, strict=True)) + '"'
