from __future__ import annotations

import os
import socket

import pytest

from alphaapollo.processes.network import (
    find_interface,
    reserve_port,
    restrict_network_to_loopback,
    take_reserved_socket_fd,
)


def test_the_interface_is_the_one_that_leads_to_the_host() -> None:
    assert find_interface("127.0.0.1") == "lo"
    assert find_interface("no.such.host.invalid") is None
    assert find_interface("192.0.2.1") in {None, *(name for _, name in socket.if_nameindex() if name != "lo")}


def test_reserved_port_is_not_given_again() -> None:
    port = reserve_port("127.0.0.1")
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("", port))
    with (
        socket.socket(fileno=take_reserved_socket_fd(port)) as listening,
        socket.create_connection(("127.0.0.1", port), timeout=5),
    ):
        listening.accept()[0].close()


def test_single_machine_run_uses_loopback_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"NCCL_SOCKET_IFNAME": "eth7"})
    restrict_network_to_loopback()
    assert os.environ == {"NCCL_SOCKET_IFNAME": "eth7", "GLOO_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}
