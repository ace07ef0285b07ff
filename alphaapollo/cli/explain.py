"""`alphaapollo explain KEY...`: wraps python -m alphaapollo.config explain."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from alphaapollo.config.__main__ import main as config_main

USAGE = """usage: alphaapollo explain KEY [KEY ...]

Explain a key and its default, or what replaced a verl key:
  alphaapollo explain trainer.seed actor_rollout_ref.actor.use_dynamic_bsz"""


def main(argv: Sequence[str] | None = None) -> int:
    names = list(sys.argv[1:] if argv is None else argv)
    if not names or names[0] in ("-h", "--help"):
        print(USAGE, file=sys.stdout if names else sys.stderr)
        return 0 if names else 2
    return config_main(["explain", *names])
