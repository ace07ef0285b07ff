from __future__ import annotations

import os
from datetime import timedelta

import psutil
import pytest

from alphaapollo.models.store import make_store
from alphaapollo.processes.network import find_free_port, reserve_port


@pytest.mark.parametrize("is_reserved", [True, False])
def test_a_store_listens_on_one_address(is_reserved: bool) -> None:
    port = reserve_port("127.0.0.1") if is_reserved else find_free_port()
    store = make_store("127.0.0.1", port, 0, 1, timedelta(seconds=20))
    store.set("key", "value")
    client = make_store("127.0.0.1", port, 1, 1, timedelta(seconds=20))
    assert client.get("key") == b"value"
    sockets = psutil.Process(os.getpid()).net_connections("tcp")
    assert {one.laddr.ip.removeprefix("::ffff:") for one in sockets if one.laddr.port == port} == {"127.0.0.1"}
