"""`alphaapollo import-gguf FILE OUT`: convert a GGUF file to a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Sequence

from alphaapollo.cli.main import make_parser
from alphaapollo.cli.subcommand import report_refusals
from alphaapollo.utils.hub import expand_home


@report_refusals
def main(argv: Sequence[str]) -> int:
    """Convert a GGUF file. Returns exit code 2 if it cannot be converted."""
    parser = make_parser("import-gguf")
    parser.add_argument("file", metavar="FILE", type=expand_home, help="GGUF file of a language model")
    parser.add_argument("out", metavar="OUT", type=expand_home, help="folder to write, for model.path=OUT")
    options = parser.parse_args(argv)
    from alphaapollo.plugins.gguf.read import import_gguf

    print(f"{import_gguf(options.file, options.out):,} parameters written to {options.out}")
    return 0
