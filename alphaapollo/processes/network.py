"""Addresses, ports and interfaces of this machine."""

from __future__ import annotations

import os
import socket

import psutil

CONNECT_SECONDS = 5.0
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def list_trusted_hosts(host: str) -> list[str]:
    """Return the values of the Host header that a server without a password accepts. On a loopback address, these are
    only the names of the address, because a web page can make its own domain point to the server (DNS rebinding)."""
    return [*LOOPBACK, "[::1]"] if host in LOOPBACK else ["*"]


def restrict_network_to_loopback() -> None:
    """Set environment variables so that vLLM, gloo and NCCL use only the loopback interface, for runs on one machine.
    Variables that the user has set keep their values."""
    for name, value in {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}.items():
        os.environ.setdefault(name, value)


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


_reserved: dict[int, socket.socket] = {}  # listening sockets by port


def reserve_port(host: str) -> int:
    """Return a free TCP port of `host` (empty: all addresses). The port is reserved until take_reserved_socket_fd."""
    listening = socket.socket()
    listening.bind((host, 0))
    listening.listen(socket.SOMAXCONN)
    port = int(listening.getsockname()[1])
    _reserved[port] = listening
    return port


def take_reserved_socket_fd(port: int, host: str = "") -> int:
    """Return the file descriptor of a reserved port's listening socket. If the port is not reserved, listen on it at
    `host`. The caller must close the file descriptor."""
    return (_reserved.pop(port, None) or socket.create_server((host, port))).detach()


def find_connection_error(host: str, port: int) -> str:
    """Return why a TCP connection to the address fails; empty if it succeeds."""
    try:
        socket.create_connection((host, port), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        return str(error)
    return ""


def find_interface(host: str) -> str | None:
    """Return the network interface, e.g. eth0, that connects to `host`; None if `host` has no IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # connecting a UDP socket selects the route and sends nothing
        except OSError:
            return None
        local_address = probe.getsockname()[0]
    addresses = psutil.net_if_addrs()
    return next((name for name, entries in addresses.items() if local_address in [e.address for e in entries]), None)
