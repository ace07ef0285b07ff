"""Convert scripts of verl, TRL, OpenRLHF and ms-swift to shell scripts with alphaapollo commands, with a comment at
each difference."""

from __future__ import annotations

import pkgutil
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from alphaapollo.config.check import find_unknown_names
from alphaapollo.config.errors import ConfigError
from alphaapollo.config.key_tables import PROJECTS
from alphaapollo.config.keys import COMMANDS
from alphaapollo.config.load import load_config
from alphaapollo.config.schema import Config
from alphaapollo.plugins.port.convert import NOT_KNOWN, ArgumentLines, translate_keys
from alphaapollo.plugins.port.shell import MACHINE_VALUE, remove_shell_marks
from alphaapollo.plugins.port.sources import WORD, ForeignCommand, list_foreign_commands

HEADER = "#!/usr/bin/env bash\n# {}, ported to alphaapollo. Check it with trainer.dry_run=True; see docs/{}.md.\n"
OFFLINE = "\n# To send to {0}, log in and remove the next line.\nexport {1}_MODE=${{{1}_MODE:-offline}}\n"
PART = r"\$\{\w+\}|\$\((?:nproc|hostname|whoami|pwd|date(?: -u)?(?: \+['\"]?[\w%:.-]+['\"]?)?)\)"
EXPANDED = re.compile(rf"{PART}|\$\(\((?:[\w\s+*/%()-]|{PART})+\)\)", re.ASCII)
"""What a ported script may leave to the shell. Other text of a script, such as `$(command)`, is only shown."""
REFUSED = "refused at the start"
VERDICT = rf"{REFUSED}|not supported|not converted|left out|known only at run time|{NOT_KNOWN}"
LEFT_TO_USER = re.compile(rf" *(?:# )?'?([\w.]+)=.*?(?:: |  # )(?:{VERDICT})")
"""Line of a ported script about an option that the user has to replace, or to leave out."""
OTHER_PROJECTS = {
    r"skyrl": ("SkyRL", "verl"),
    r"open[_-]instruct": ("open-instruct", "trl"),
    r"slime": ("slime", "verl"),
    r"nemo[_-]?rl|\A(?=.*^checkpointing:)(?=.*^policy:)": ("NeMo-RL", "verl"),
    r"prime[_-]rl|^\[+orchestrator": ("prime-rl", "async"),
    r"rllm": ("rLLM", "agents"),
}
"""{pattern in the text of a script: (project that is not converted, its closest page)}"""


def port_script(source: str, path: str, arguments: Iterable[str] = ()) -> str:
    """Convert the text of a script to a shell script with alphaapollo commands. Raises ValueError if it has no command
    that can be converted.

    arguments: `KEY=VALUE` adds an option to the command, `NAME=VALUE` sets a variable that the script reads, and words
    after `--` are the arguments of the script.
    """
    words = [*arguments, "--"]
    place = words.index("--")
    pairs = {match[1]: match[2] for word in words[:place] if (match := WORD.fullmatch(word))}
    pairs |= {str(number): word for number, word in enumerate(words[place + 1 : -1], 1)}
    commands = list_foreign_commands(source, path, {name: pairs[name] for name in pairs if "." not in name})
    new_keys = {key: value for key, value in pairs.items() if "." in key}
    translated = [_translate_command(command, new_keys) for command in commands]
    ported = "".join(line + "\n" for command, lines in translated for line in _port_command(command, lines))
    converted = [command.project for command, _ in translated if command.command]
    if not converted:
        others = "".join(f" {_format_comment(one.place)[2:]} ({one.reason})." for one, _ in translated)
        raise ValueError(
            f"{path}: no training command of {', '.join(PROJECTS.values())}, such as python3 -m verl.trainer.main_ppo, "
            f"trl grpo, openrlhf.cli.train_sft or swift rlhf.{others}"
        )
    header = HEADER.format(" ".join(Path(path).name.split()), converted[0])
    uploading = [name for name in ("wandb", "swanlab") if re.search(f"trainer.logger=.*{name}", ported)]
    return header + "".join(OFFLINE.format(name, name.upper()) for name in uploading) + ported


def describe_next_steps(script: str) -> str:
    """Return what to do with a ported script: the options that are left to the user, and how to check and run it.
    The lines are comments, so that they may be in the script."""
    left = [match[1] for line in script.splitlines() if (match := LEFT_TO_USER.match(line))]
    left += ["data.train_files (not in the script)"] * (not re.search(r"\bdata\.(?:train_files|path)=", script))
    steps = [f"Replace or leave out, see the comments: {', '.join(dict.fromkeys(left))}"] if left else []
    steps.append("Save the new script: alphaapollo port SCRIPT > ours.sh")
    steps += ["Check it, without a start: bash ours.sh trainer.dry_run=True", "Run it: bash ours.sh"]
    return "# Next steps:\n" + "".join(f"# {number}. {step}\n" for number, step in enumerate(steps, 1))


def describe_other_project(text: str) -> str:
    """Return which known project, whose scripts are not converted, a text is from; empty if none."""
    flags = re.IGNORECASE | re.MULTILINE | re.DOTALL
    found = next((one for pattern, one in OTHER_PROJECTS.items() if re.search(pattern, text, flags)), None)
    return f"scripts of {found[0]} are not converted; the closest page is docs/{found[1]}.md" if found else ""


def _translate_command(command: ForeignCommand, new_keys: Mapping[str, str]) -> tuple[ForeignCommand, ArgumentLines]:
    """Return the arguments of a command; the command is refused if its program or its options are another project's."""
    if not command.command:
        return command, {}
    if other := describe_other_project(command.place):
        return replace(command, command="", reason=other), {}
    program = command.command.split()[0]
    lines = translate_keys({**command.values, **new_keys}, program, command.project, command.program)
    foreign, total = sum(NOT_KNOWN in comment for _, comment in lines.values()), len(command.values)
    if foreign > max(2, total / 2):
        reason = f"{foreign} of its {total} options are not of {PROJECTS[command.project]}: another project or version"
        return replace(command, command="", reason=reason), {}
    known = [word for word, _ in lines.values() if word and not MACHINE_VALUE.search(word)]
    unknown = [key for key, (word, _) in lines.items() if word and word not in known]
    for error in _find_start_errors(program, [*command.command.split()[1:], *known], unknown):
        if key := next((key for key, (word, _) in lines.items() if word in known and error.startswith(key)), ""):
            lines[key] = (lines[key][0], f"{REFUSED}: {error} {lines[key][1]}".rstrip())
    return command, lines


def _find_start_errors(program: str, words: Sequence[str], unknown: Sequence[str]) -> list[str]:
    """Return the errors that a command reports for these words before it reads files, except those that depend on the
    keys `unknown`."""
    errors: list[str] = []
    try:
        config = load_config(COMMANDS[program], program.removeprefix("main_"), words)
        errors = [*find_unknown_names(config)]
        if isinstance(config, Config) and not errors:
            pkgutil.resolve_name("alphaapollo.trainer.setup.combinations:check_setting_combinations")(config)
    except ValueError as error:
        errors = error.errors if isinstance(error, ConfigError) else [str(error)]
        wrong = [word for word in words if any(line.startswith(word.partition("=")[0]) for line in errors)]
        if wrong:  # the others are checked without them
            others = [*unknown, *(word.partition("=")[0] for word in wrong)]
            errors += _find_start_errors(program, [word for word in words if word not in wrong], others)
    return [error for error in errors if not any(key in error for key in unknown)]


def _format_comment(text: str) -> str:
    """Format a text as a comment of one line."""
    return f"# {' '.join(remove_shell_marks(text).split())}"


def _port_command(command: ForeignCommand, lines: ArgumentLines) -> Iterator[str]:
    """Yield the lines of the alphaapollo command for a command of another project."""
    if not command.command:
        yield "\n" + _format_comment(f"{command.place}: not converted. {command.reason}")
        return
    program, *settings = command.command.split()
    yield "\n" + _format_comment(command.place)
    yield from map(_format_comment, command.notes)
    words = {word.split("=")[0]: (word, "the program") for word in settings}
    found = [*(words | {key: line for key, line in lines.items() if key not in words or line[0]}).values()]
    unknown = {text for word, _ in found for text in MACHINE_VALUE.findall(word)}
    if expanded := sorted(filter(EXPANDED.fullmatch, unknown)):
        yield _format_comment(f"from the environment, or known only at run time: {', '.join(expanded)}")
    yield "arguments=("
    for word, comment in found:
        if {*MACHINE_VALUE.findall(word)} - {*expanded}:
            word, comment = "", f"{word}: known only at run time; set it. {comment}"
        parts = (_quote_for_shell(word), comment and _format_comment(comment))
        yield "    " + "  ".join(filter(None, parts))
    yield f')\npython -m alphaapollo.trainer.{program} "${{arguments[@]}}" "$@"'


def _quote_for_shell(word: str) -> str:
    """Quote a word for the shell, except parts such as `${HOME}` that the shell must expand at run time."""
    parts = MACHINE_VALUE.split(word)  # known, unknown, known, ...
    parts[::2] = [re.sub(r'([\\"`$])', r"\\\1", part) for part in parts[::2]]
    if len(parts) == 1 and "\n" in word:
        return "$'" + re.sub(r"([\\'])", r"\\\1", word).replace("\n", r"\n") + "'"
    return f'"{"".join(parts)}"' if len(parts) > 1 else shlex.quote(word) if word else ""
