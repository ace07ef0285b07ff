"""Subcommands that show runs: `alphaapollo view` in the browser, `report` in one file."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from alphaapollo.cli.main import make_parser
from alphaapollo.cli.subcommand import report_refusals
from alphaapollo.observability.terminal import Terminal
from alphaapollo.processes.network import list_trusted_hosts
from alphaapollo.utils.disk import replace_file
from alphaapollo.utils.hub import expand_home

LOOPBACK = "127.0.0.1"
NOTES_FOLDER = "~/.local/share"  # unless XDG_DATA_HOME is set


@report_refusals
def view(argv: Sequence[str]) -> int:
    """Serve the viewer until Ctrl-C. Returns exit code 2 if the folder or the port cannot be used."""
    parser = make_parser("view", allow_abbrev=False)
    parser.add_argument(
        "outputs", nargs="?", type=expand_home, default="outputs", help="folder with runs, or a run (default: outputs)"
    )
    parser.add_argument("--port", type=int, default=6060, help="port to listen on (default 6060; 0: any free port)")
    parser.add_argument(
        "--host", default=LOOPBACK, help=f"address to listen on (default {LOOPBACK}: this machine only)"
    )
    options = parser.parse_args(argv)
    root, host = options.outputs.absolute(), options.host
    if not root.is_dir():
        raise ValueError(f"{root} is no folder. Give the folder of your runs, e.g. outputs.")
    from alphaapollo.plugins.viewer.app import make_app, make_server
    from alphaapollo.plugins.viewer.index import RunIndex

    listener = socket.create_server((host, options.port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    address = f"[{host}]" if ":" in host else host
    terminal, notes = Terminal(highlight=False), find_notes_file()
    terminal.write(f"viewer of {root}: http://{address}:{listener.getsockname()[1]}   (Ctrl-C ends it)")
    if notes is None:
        terminal.write(f"notes of runs are not kept: {NOTES_FOLDER} cannot be written. Set XDG_DATA_HOME to a folder.")
    with suppress(KeyboardInterrupt), tempfile.TemporaryDirectory() as folder:
        index = RunIndex(root, Path(folder, "index.sqlite"), notes=notes)
        app = make_app(index, list_trusted_hosts(host))
        make_server(app).run(sockets=[listener])  # uvicorn raises Ctrl-C again after its end
    return 0


def find_notes_file() -> Path | None:
    """Return the file in which the viewer keeps numbers and notes of runs; None if its folder cannot be written."""
    folder = Path(os.environ.get("XDG_DATA_HOME") or NOTES_FOLDER).expanduser() / "alphaapollo"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder / "viewer.sqlite"
    return None


@report_refusals
def report(argv: Sequence[str]) -> int:
    """Write the report. Returns exit code 2 if a folder is no run, or if the file cannot be written."""
    parser = make_parser("report", allow_abbrev=False)
    parser.add_argument("runs", metavar="RUN", nargs="+", type=expand_home, help="folder of a run, also a running one")
    parser.add_argument("-o", "--output", type=expand_home, default="report.html", help="HTML file to write")
    options = parser.parse_args(argv)
    output = options.output
    if output.suffix != ".html":
        raise ValueError(f"-o {output} must end in .html. Print the page in a browser to get a PDF.")
    from alphaapollo.plugins.viewer.report import make_report

    replace_file(output, [make_report(options.runs)])
    Terminal(highlight=False).write(f"written: {output}")
    return 0
