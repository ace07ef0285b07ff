"""python -m alphaapollo.config explain KEY...   what became of a key, one line each
python -m alphaapollo.config port SCRIPT [KEY=VALUE ...] [NAME=VALUE ...]
                                              print a command of verl's (a shell script) as ours; docs/verl.md
python -m alphaapollo.config docs             write docs/config.md from the schema (in a clone)
"""

from __future__ import annotations

import sys
from pathlib import Path

from alphaapollo.config.docs import config_page
from alphaapollo.config.errors import EXIT_CODE, failed
from alphaapollo.config.explain import explain
from alphaapollo.config.port.translate import port


def main(argv: list[str]) -> int:
    match argv:
        case ["explain", *names] if names:
            print("\n".join(explain(name) for name in names))
        case ["port", script, *given]:
            try:
                print(port(Path(script).read_text(encoding="utf-8"), script, given), end="")
            except (OSError, ValueError) as error:
                return failed(error, EXIT_CODE)
        case ["docs"]:
            page = Path(__file__).resolve().parents[2] / "docs" / "config.md"
            page.write_text(config_page(), encoding="utf-8")
            print(f"wrote {page}")
        case _:
            print(__doc__, file=sys.stderr)
            return EXIT_CODE
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
