"""`alphaapollo skill [install [FOLDER]]`: print SKILL.md, or write it to where assistants look for skills."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from alphaapollo.cli.main import make_parser
from alphaapollo.cli.subcommand import report_refusals
from alphaapollo.utils.hub import expand_home

SKILL = Path(__file__).with_name("SKILL.md")


@report_refusals
def main(argv: Sequence[str]) -> int:
    """Print or install the skill. An existing file is replaced, because it may be that of another version."""
    parser = make_parser("skill")
    parser.add_argument("action", nargs="?", choices=["install"], help="write the file; without it, print the file")
    parser.add_argument(
        "folder",
        nargs="?",
        type=expand_home,
        default=Path(".agents/skills"),
        help="folder with a folder per skill (default .agents/skills)",
    )
    options = parser.parse_args(argv)
    text = SKILL.read_text(encoding="utf-8")
    if options.action is None:
        print(text, end="")
        return 0
    path = options.folder / "alphaapollo" / SKILL.name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    print(f"wrote {path}")
    return 0
