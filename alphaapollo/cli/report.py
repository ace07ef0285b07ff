"""`alphaapollo report RUN [RUN ...] -o FILE`: a report of a run, or a comparison of several, in one file."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from alphaapollo.config.errors import report_error
from alphaapollo.observability.terminal import Terminal
from alphaapollo.utils.disk import replace_file


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report. Returns exit code 2 if a folder is no run, or if the file cannot be written."""
    description = "Write a report of a run, or a comparison of several, into one file."
    parser = argparse.ArgumentParser(prog="alphaapollo report", description=description, allow_abbrev=False)
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="folder of a run, also of one that goes on")
    parser.add_argument("-o", "--output", type=Path, default="report.html", help="HTML file to write")
    options = parser.parse_args(argv)
    output = options.output.expanduser()
    try:
        if output.suffix != ".html":
            raise ValueError(f"-o {output} must end in .html. Print the page in a browser to get a PDF.")
        from alphaapollo.viewer.report import make_report

        content = make_report(options.runs)
    except (OSError, ValueError) as error:
        return report_error(error, 2)
    try:
        replace_file(output, [content])
    except OSError as error:
        return report_error(ValueError(f"{output} cannot be written ({error.strerror}). Choose another -o."), 2)
    Terminal(highlight=False).write(f"written: {output}")
    return 0
