"""The network of this machine, seen by `alphaapollo doctor`: ports, names, Ray's cluster."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

from alphaapollo.cli.finding import Finding
from alphaapollo.utils.network import hold_port, take_held

SERVE_PORT = 8000  # alphaapollo serve
SECONDS = 5.0  # that a connection may take


def ports() -> Iterator[Finding]:
    """A process of this machine reaches another one; workers find each other that way."""
    port = hold_port("")
    try:
        problem = unreachable("127.0.0.1", port)
        named = unreachable(socket.gethostname(), port)
    finally:
        os.close(take_held(port))
    if problem:
        yield Finding("ports", f"127.0.0.1 cannot be reached: {problem}", "fail", "allow connections to the loopback")
    elif named:
        todo = "let the host's name lead to this machine (/etc/hosts); a run on one node does without"
        yield Finding("ports", f"{socket.gethostname()} cannot be reached: {named}", "warn", todo)
    else:
        yield Finding("ports", f"127.0.0.1 and {socket.gethostname()} can be reached")
    if not unreachable("127.0.0.1", SERVE_PORT):
        yield Finding("ports", f"{SERVE_PORT} is taken", "warn", "alphaapollo serve RUN --port another")


def ray() -> Iterator[Finding]:
    """The cluster that RAY_ADDRESS names; without it a run starts its own."""
    address = os.environ.get("RAY_ADDRESS", "")
    if not address:
        yield Finding("ray", "RAY_ADDRESS is not set: a run starts Ray on this machine, and ends it")
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "://" in host:
        found = f"RAY_ADDRESS={address}: whether it is there is seen when a run joins it"
        yield Finding("ray", found, "warn", "HOST:PORT of the head node is what `ray start` prints (docs/scaling.md)")
    elif problem := unreachable(host, int(port)):
        todo = "start Ray there (docs/scaling.md), or unset RAY_ADDRESS for this machine alone"
        yield Finding("ray", f"RAY_ADDRESS={address} cannot be reached: {problem}", "fail", todo)
    else:
        yield Finding("ray", f"the cluster at {address} answers")


def unreachable(host: str, port: int) -> str:
    """Why nobody can be reached there; empty: somebody listens."""
    try:
        socket.create_connection((host, port), timeout=SECONDS).close()
    except OSError as error:
        return str(error)
    return ""
