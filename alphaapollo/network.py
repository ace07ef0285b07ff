"""Addresses and ports of this machine."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A TCP port that nobody uses at the moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
