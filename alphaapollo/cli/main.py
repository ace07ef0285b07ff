"""`alphaapollo VERB ...`: finds the verb, and gives the rest of the words to the main that does it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from alphaapollo import __version__
from alphaapollo.cli.verbs import VERBS, Verb
from alphaapollo.utils.entry_point import Main
from alphaapollo.utils.registry import nearest

HELP = ("-h", "--help", "help")
REFUSED = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the verb's exit code: 0 done, 1 failed, 2 refused before the start, 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in HELP:
        print(overview(), end="")
        return 0 if words else REFUSED
    if words[0] == "--version":
        print(__version__)
        return 0
    name, *rest = words
    if name not in VERBS:
        print(f"error: {unknown(name)}", file=sys.stderr)
        return REFUSED
    verb = VERBS[name]
    if verb.command and any(word in HELP[:2] for word in rest):
        print(verb_help(verb), end="")
        return 0
    door: Main = importlib.import_module(verb.module).main
    return door(verb.words(rest))


def unknown(name: str) -> str:
    """What to say of a verb that there is not."""
    near = nearest(name, VERBS)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    return f"alphaapollo {name}: no such verb.{hint} Known: {', '.join(VERBS)}."


def overview() -> str:
    """One screen: the verbs, and how they are called."""
    width = max(map(len, VERBS))
    lines = (f"  {verb.name:<{width}}  {verb.what}" for verb in VERBS.values())
    return "\n".join(
        [
            "alphaapollo: post-training of language models with reinforcement learning",
            "",
            "  alphaapollo VERB [--config FILE] [KEY=VALUE ...]",
            "",
            *lines,
            "",
            "  alphaapollo VERB --help        its keys that matter",
            "  alphaapollo explain KEY        any key",
            "  alphaapollo --version",
            "",
        ]
    )


def verb_help(verb: Verb) -> str:
    """One screen: the keys that matter, with meaning and default, and what else there is."""
    from alphaapollo.config.keys import COMMANDS, accepted_keys, format_value

    known = accepted_keys(COMMANDS[verb.command])
    shown: list[str] = []
    for name in verb.keys:
        key = known[name]
        default = "" if key.default == "" else f" Default {format_value(key.default)}."
        shown += [f"  {name}", f"      {key.meaning}{default}"]
    return "\n".join(
        [
            f"alphaapollo {verb.name}: {verb.what}",
            "",
            f"  alphaapollo {verb.name} [--config FILE] [KEY=VALUE ...]",
            f"  alphaapollo {verb.name} {verb.example}",
            "",
            "The keys that matter:",
            *shown,
            "",
            "  --config FILE    your own YAML file, on top of the defaults; keys after it win",
            "  --cfg            print the whole configuration, and start nothing",
            "",
            f"All {len(known)} keys: docs/config.md, or alphaapollo explain KEY. All options and presets:",
            f"  python -m {verb.module} --help",
            "",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
