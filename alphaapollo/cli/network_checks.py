"""Network checks of `alphaapollo doctor`: ports, host name, Ray cluster."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

from alphaapollo.cli.check_result import CheckResult
from alphaapollo.utils.network import hold_port, take_held_port

SERVE_PORT = 8000  # alphaapollo serve
SECONDS = 5.0  # timeout of a connection


def ports() -> Iterator[CheckResult]:
    """Check that processes of this machine can connect to each other, as workers do."""
    port = hold_port("")
    try:
        problem = connection_error("127.0.0.1", port)
        named = connection_error(socket.gethostname(), port)
    finally:
        os.close(take_held_port(port))
    if problem:
        yield CheckResult(
            "ports", f"127.0.0.1 cannot be reached: {problem}", "fail", "allow connections to the loopback"
        )
    elif named:
        todo = "map the host name to this machine in /etc/hosts; only multi-node runs need it"
        yield CheckResult("ports", f"{socket.gethostname()} cannot be reached: {named}", "warn", todo)
    else:
        yield CheckResult("ports", f"127.0.0.1 and {socket.gethostname()} can be reached")
    if not connection_error("127.0.0.1", SERVE_PORT):
        yield CheckResult("ports", f"{SERVE_PORT} is taken", "warn", "alphaapollo serve RUN --port another")


def ray() -> Iterator[CheckResult]:
    """Check the cluster of RAY_ADDRESS; without it a run starts its own Ray."""
    address = os.environ.get("RAY_ADDRESS", "")
    if not address:
        yield CheckResult("ray", "RAY_ADDRESS is not set: a run starts and stops its own Ray")
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "://" in host:
        found = f"RAY_ADDRESS={address}: not checked, because it is not HOST:PORT"
        yield CheckResult("ray", found, "warn", "set it to the HOST:PORT that `ray start` prints (docs/scaling.md)")
    elif problem := connection_error(host, int(port)):
        todo = "start Ray there (docs/scaling.md), or unset RAY_ADDRESS to use this machine"
        yield CheckResult("ray", f"RAY_ADDRESS={address} cannot be reached: {problem}", "fail", todo)
    else:
        yield CheckResult("ray", f"the cluster at {address} answers")


def connection_error(host: str, port: int) -> str:
    """Return why a connection fails; empty if it succeeds."""
    try:
        socket.create_connection((host, port), timeout=SECONDS).close()
    except OSError as error:
        return str(error)
    return ""
