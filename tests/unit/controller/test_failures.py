"""What the driver says of a worker's failure over Ray; no Ray is started."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from alphaapollo.controller.ranks import WorkerDied, WorkerFailed
from alphaapollo.controller.ray_ranks import RayRanks


class OutOfMemoryError(RuntimeError):
    """As torch's."""


def said(cause: Exception) -> str:
    ranks: Any = object.__new__(RayRanks)
    ranks.role, ranks.where = "policy", []

    async def fail() -> None:
        raise RayTaskError("call", "traceback", cause)

    with pytest.raises(WorkerFailed) as caught:
        asyncio.run(ranks._one(3, fail()))
    return str(caught.value)


def test_a_gpu_without_room_names_the_keys() -> None:
    text = said(OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    assert text.startswith(
        "the policy worker of rank 3: CUDA out of memory. Tried to allocate 2.00 GiB. What makes room"
    )
    assert "ppo_max_token_len_per_gpu" in text and "bug" not in text
    assert "which is a bug" in said(RuntimeError("shapes differ"))


def test_of_a_rank_that_died_the_others_may_know_first() -> None:
    ranks: Any = object.__new__(RayRanks)
    ranks.role, ranks.where, ranks.several_nodes = "policy", ["pid 7 on node 10.0.0.1", "pid 9 on node 10.0.0.2"], True

    async def closed() -> None:
        raise RayTaskError("call", "Connection closed by peer", RuntimeError())

    async def dies() -> None:
        await asyncio.sleep(0.05)
        raise ActorDiedError

    with pytest.raises(WorkerDied, match=r"rank 1 \(pid 9 on node 10\.0\.0\.2\) died"):
        asyncio.run(ranks._all([closed(), dies()]))
    with pytest.raises(WorkerFailed, match="Connection closed by peer"):
        asyncio.run(ranks._all([closed(), closed()]))  # all have failed: nothing is waited for
