"""List the commands that a shell script runs: bash executes it in the sandbox, and programs are only recorded."""

from __future__ import annotations

import re
import shlex
import subprocess
import time
from importlib import resources

from alphaapollo.processes.python_command import make_module_command, make_subprocess_environ

Command = tuple[int, list[str]]  # (line number in the script, words of the command)
MACHINE_VALUE = re.compile("\2([^\3]*)\3")  # text of a value that depends on the machine, e.g. ${HOME}
MAX_SOURCE = 256 << 10  # characters of a file
MAX_SCRIPT = 96 << 10  # bytes of a shell script, which is one argument of a process: Linux allows 128 KiB
SECONDS = 120.0  # after which no further round with newly found variables starts
QUOTED = r"""\\.|"(?:\\.|[^"\\])*"|'[^']*'"""
HERE_DOCUMENT = r"""<<-?\s*['"]?(?P<end>\w+)['"]?\n(?s:.{0,8000}?)\n\s*(?P=end)\n"""
KEPT = rf"""{QUOTED}|(?<!\S)\#.*|\(\(.{{0,500}}?\)\)|\[\[.{{0,500}}?\]\]|{HERE_DOCUMENT}"""
TARGET = rf"""(?:{QUOTED}|>\([^()]*\)|\$\([^()]*\)|[^\s;&|()<>"'])+"""
REWRITES = {  # pattern -> replacement, for what stubs.sh cannot define; lengths are limited, so the time is linear
    r"(?:\d|&)?>>?[ \t]*/dev/null": "",  # in the sandbox, a redirection and its command would fail
    rf"(?P<keep>{KEPT})|(?<![\w$<>=-])(?:\d|&)?>>?[ \t]*{TARGET}": r"\g<keep>",
    r"""(?<![\w./${}~-])(["']?)(?:[$~./\w][\w./${}~-]*)?/(python[\d.]*|torchrun)\1(?=[\s"'};)])""": r"\2",
    r"\[\[ (!? ?-[defrswx] \S+) \]\]": r"[ \1 ]",
    r"\$\{BASH_SOURCE(?:\[0\])?[^}]{0,200}\}|\$BASH_SOURCE\b": "$0",
    r"\$\{(\w+):?\?[^}]{0,500}\}": r"${\1}",
    r"\$\(\(((?:[^()=+-]|[+-](?![+-])|\([^()]*\))*)\)\)": r'$(arithmetic "\1")',
}


def remove_shell_marks(text: str) -> str:
    """Return a text of a data file or Python file without the characters that mark a value of the shell."""
    return re.sub("[\2\3\4]", "", text)


def list_script_commands(source: str, path: str, variables: dict[str, str]) -> tuple[list[Command], list[str]]:
    """Return the commands that the script `source` would run if only `variables` were set, and bash's error messages.

    A value that depends on the machine is kept as text between the characters \\2 and \\3, e.g. `\\2${HOME}\\3/data`.
    Raises ValueError if bash cannot parse the script, if it does not end, or if this machine has no sandbox.
    """
    if len(source.encode()) > MAX_SCRIPT:
        raise ValueError(f"{path} is larger than {MAX_SCRIPT >> 10} KiB. Port only the training script.")
    defaulted = re.findall(r"\$\{(\w+):?[-=+]", re.sub(r"(?<!\S)#.*", "", source))
    for pattern, replacement in REWRITES.items():
        source = re.sub(pattern, replacement, source)
    source = re.sub(r"\[\[? .{0,500}? \]", lambda test: re.sub(r"\$(\w+)|\$\{(\w+)\}", r"${\1\2-}", test[0]), source)
    for name in variables:  # the script's assignments must not change them
        source = re.sub(rf"(?m)(^|[;&|]|\b(?:then|do|else|export|local)\b)([ \t]*){name}(\+?=)", r"\1\2_\3", source)
    known, unset, deadline = dict(variables), {""}, time.monotonic() + SECONDS
    while unset:
        if time.monotonic() > deadline:
            raise ValueError(f"{path} takes over {SECONDS:g} seconds. Set its variables: port SCRIPT NAME=VALUE.")
        commands, errors = _run_script_in_sandbox(source, path, known)
        unset = {*re.findall(r"line \d+: \$?([A-Za-z_]\w*|\d\d?)(?:\[.*\])?: unbound variable", errors)} - known.keys()
        known |= {name: "" if name in defaulted else f"\2${{{name}}}\3" for name in unset}
    notes = re.findall(rf"(?m)^(?:{re.escape(path)}: |environment: )?(?:-c: )?((?:line \d+: |stopped).+)", errors)
    if syntax_errors := [note for note in notes if re.search("syntax error near|unexpected (?:EOF|end)", note)]:
        raise ValueError(f"{path}: {syntax_errors[0]}. Correct the script.")
    return commands, list(dict.fromkeys(MACHINE_VALUE.sub(r"\1", note) for note in notes))


def _run_script_in_sandbox(source: str, path: str, variables: dict[str, str]) -> tuple[list[Command], str]:
    """Run the script with bash in the sandbox. Returns the recorded commands and bash's error messages.

    stubs.sh prints `PROCESS \\37 LINE \\37 WORD \\0` for each word; byte 4 is a space inside a word. Digits in
    `variables` are the script's arguments.
    """
    stubs = (resources.files("alphaapollo.plugins.port") / "stubs.sh").read_text(encoding="utf-8")
    stubs += "".join(f"{name}={shlex.quote(value)}\n" for name, value in variables.items() if not name.isdigit())
    last = max((int(name) for name in variables if name.isdigit()), default=0)
    arguments = [path, *(variables.get(str(number), "") for number in range(1, last + 1))]
    options = ("-u", "-f", "-c", stubs + source)
    command = make_module_command("alphaapollo.tools.sandbox.bash", *options, *arguments)
    environ = make_subprocess_environ()
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False, env=environ)
    output, errors = (text.decode(errors="replace").replace("\4", " ") for text in (done.stdout, done.stderr))
    if done.returncode == 125:  # this machine has no bash or no sandbox
        raise ValueError(errors.strip())
    first, commands = stubs.count("\n"), dict[str, Command]()
    for process, line, word in re.findall("(\\d+)\37(\\d+)\37([^\0]*)\0", output):
        commands.setdefault(process, (int(line) - first, []))[1].append(word)
    return list(commands.values()), re.sub(r"line (\d+)", lambda found: f"line {int(found[1]) - first}", errors)
