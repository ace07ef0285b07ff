"""`alphaapollo completion SHELL`: a small script that completes verbs, files and keys, for the shell to read."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

from alphaapollo.cli.verbs import VERBS

HOW = {
    "bash": 'eval "$(alphaapollo completion bash)"     in ~/.bashrc',
    "zsh": 'eval "$(alphaapollo completion zsh)"      after compinit, in ~/.zshrc',
    "fish": "alphaapollo completion fish | source     in ~/.config/fish/config.fish",
}

BASH = """_alphaapollo() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} words=""
    if [[ $word == = ]]; then # of a key: a file, maybe
        COMPREPLY=($(compgen -f))
        return
    elif [ "$COMP_CWORD" -eq 1 ]; then
        words="{verbs}"
    elif [[ $previous != --config && $previous != = && $word != *=* ]]; then
        case "${{COMP_WORDS[1]}}" in
{cases}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    [[ ${{#COMPREPLY[@]}} -ne 1 || ${{COMPREPLY[0]}} != *= ]] || compopt -o nospace
}}
complete -o default -F _alphaapollo alphaapollo
"""

ZSH = """autoload -Uz bashcompinit && bashcompinit
"""

FISH = """complete -c alphaapollo -n __fish_use_subcommand -f
{verbs}
{keys}
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="alphaapollo completion",
        description="Prints a script that completes the words of `alphaapollo`. To use it:\n\n  "
        + "\n  ".join(HOW.values()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=sorted(HOW))
    print(script(parser.parse_args(argv).shell), end="")
    return 0


def script(shell: str) -> str:
    """For bash, zsh (which reads bash's) or fish."""
    if shell == "fish":
        return FISH.format(verbs="\n".join(_fish_verbs()), keys="\n".join(_fish_keys()))
    cases = "\n".join(f'        {verb}) words="{" ".join(words)}" ;;' for verb, words in _words().items())
    bash = BASH.format(verbs=" ".join(VERBS), cases=cases)
    return ZSH + bash if shell == "zsh" else bash


def _words() -> dict[str, list[str]]:
    """verb -> what may follow it: options, and KEY= for each of its keys; `explain` takes names of all of them."""
    from alphaapollo.config.keys import COMMANDS, accepted_keys

    found = {
        verb.name: ["--config", "--cfg", "--help", *(f"{key}=" for key in accepted_keys(COMMANDS[verb.command]))]
        for verb in VERBS.values()
        if verb.command
    }
    found["explain"] = sorted({key for schema in COMMANDS.values() for key in accepted_keys(schema)})
    found["completion"] = sorted(HOW)
    return found


def _fish_verbs() -> Iterable[str]:
    for verb in VERBS.values():
        yield f"complete -c alphaapollo -n __fish_use_subcommand -a {verb.name} -d {_quoted(verb.what)}"


def _fish_keys() -> Iterable[str]:
    for verb, words in _words().items():
        yield f"complete -c alphaapollo -n '__fish_seen_subcommand_from {verb}' -a {_quoted(' '.join(words))}"


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
