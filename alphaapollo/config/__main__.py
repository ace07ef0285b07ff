"""python -m alphaapollo.config explain KEY...   print what each key does, in one line
python -m alphaapollo.config port SCRIPT [KEY=VALUE ...] [NAME=VALUE ...]
                                              print a command of verl's (a shell script) as ours; docs/verl.md
python -m alphaapollo.config docs             write docs/config.md, docs/config/ and docs/verl_keys.md (in a clone)
"""

from __future__ import annotations

import sys
from pathlib import Path

from alphaapollo.config.docs import pages
from alphaapollo.config.errors import EXIT_CODE, report_error
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
                return report_error(error, EXIT_CODE)
        case ["docs"]:
            folder = Path(__file__).resolve().parents[2] / "docs"
            (folder / "config").mkdir(exist_ok=True)
            for path, text in pages().items():
                (folder / path).write_text(text, encoding="utf-8")
            print(f"wrote {len(pages())} pages to {folder}")
        case _:
            print(__doc__, file=sys.stderr)
            return EXIT_CODE
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
