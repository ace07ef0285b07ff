"""The store through which the ranks of a process group find each other."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed

from alphaapollo.processes.network import take_reserved_socket_fd


def make_store(host: str, port: int, rank: int, world_size: int, timeout: timedelta, use_libuv: bool = True) -> Any:
    """Make the store of a process group as torch does, but listen on `host` instead of all addresses."""
    listening = take_reserved_socket_fd(port, host) if rank == 0 else None
    c10d: Any = torch.distributed
    options = {"master_listen_fd": listening, "use_libuv": use_libuv}
    return c10d.TCPStore(host, port, world_size, rank == 0, timeout, **options)
