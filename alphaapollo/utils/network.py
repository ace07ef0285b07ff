"""Addresses, ports and interfaces of this machine."""

from __future__ import annotations

import fcntl
import os
import socket
import struct


def stay_on_loopback() -> None:
    """For a run that has one machine: vLLM, gloo and NCCL, in whatever it starts from now on, listen where nobody
    outside reaches them. What the user has set stays."""
    for name, value in {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}.items():
        os.environ.setdefault(name, value)


def free_port() -> int:
    """A TCP port that nobody uses at the moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


_held: dict[int, socket.socket] = {}


def hold_port(host: str) -> int:
    """A TCP port of `host`, an address of this machine (empty: all of them), on which this process listens from now on,
    so that nobody else is given it before `take_held`."""
    listening = socket.socket()
    listening.bind((host, 0))
    listening.listen(socket.SOMAXCONN)
    port = int(listening.getsockname()[1])
    _held[port] = listening
    return port


def take_held(port: int) -> int:
    """The listening socket of a held port, as a file descriptor that is the caller's to close."""
    return _held.pop(port).detach()


def interface_to(host: str) -> str | None:
    """The network interface, e.g. eth0, by which this machine reaches `host`; None where that has no IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # sends nothing: it asks for the route
        except OSError:
            return None
        own = probe.getsockname()[0]
        return next((name for _, name in socket.if_nameindex() if _address_of(name, probe) == own), None)


def _address_of(interface: str, probe: socket.socket) -> str | None:
    """The first IPv4 address of an interface; None: it has none."""
    siocgifaddr = 0x8915
    try:
        answer = fcntl.ioctl(probe.fileno(), siocgifaddr, struct.pack("256s", interface.encode()[:15]))
    except OSError:
        return None
    return socket.inet_ntoa(answer[20:24])
