"""`alphaapollo view [OUTPUTS]`: a local web viewer of runs, live while they go on."""

from __future__ import annotations

import argparse
import socket
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from alphaapollo.config.errors import report_error
from alphaapollo.observability.terminal import Terminal

LOOPBACK = "127.0.0.1"


def main(argv: Sequence[str] | None = None) -> int:
    """Serve the viewer until Ctrl-C. Returns exit code 2 if the folder or the port cannot be used."""
    parser = argparse.ArgumentParser(
        prog="alphaapollo view", description="Show runs in the browser, live while they go on.", allow_abbrev=False
    )
    parser.add_argument(
        "outputs", nargs="?", type=Path, default=Path("outputs"), help="folder with runs, or a run (default: outputs)"
    )
    parser.add_argument("--port", type=int, default=6060, help="port to listen on (default 6060; 0: any free port)")
    parser.add_argument(
        "--host", default=LOOPBACK, help=f"address to listen on (default {LOOPBACK}: this machine only)"
    )
    options = parser.parse_args(argv)
    root = options.outputs.expanduser().absolute()
    if not root.is_dir():
        return report_error(ValueError(f"{root} is no folder. Give the folder of your runs, e.g. outputs."), 2)
    return serve(root, options.host, options.port)


def serve(root: Path, host: str, port: int) -> int:
    """Serve the viewer of a folder. Returns the exit code."""
    from alphaapollo.viewer.app import make_app, make_server
    from alphaapollo.viewer.index import RunIndex

    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        return report_error(ValueError(f"cannot listen on {host}:{port} ({error.strerror}). Choose another --port."), 2)
    hosts = [host, "localhost", LOOPBACK] if host in (LOOPBACK, "localhost", "::1") else ["*"]
    Terminal(highlight=False).write(f"viewer of {root}: http://{host}:{listener.getsockname()[1]}   (Ctrl-C ends it)")
    with suppress(KeyboardInterrupt), tempfile.TemporaryDirectory() as folder:
        index = RunIndex(root, Path(folder, "index.sqlite"))
        make_server(make_app(index, hosts)).run(sockets=[listener])  # uvicorn raises Ctrl-C again after its end
    return 0
