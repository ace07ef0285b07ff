"""What the driver says of a worker's failure over Ray; no Ray is started."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator
from concurrent.futures import Future
from threading import Timer
from typing import Any

import pytest
from ray.exceptions import (
    ActorDiedError,
    LocalRayletDiedError,
    NodeDiedError,
    OutOfDiskError,
    RayError,
    RayTaskError,
)
from ray.exceptions import (
    OutOfMemoryError as RayOutOfMemoryError,
)

from alphaapollo.controller.ranks import WorkerDied, WorkerFailed
from alphaapollo.controller.ray_ranks import RayRanks
from alphaapollo.utils.heartbeat import PULSE


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


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (
            RayOutOfMemoryError("Task was killed due to the node running low on memory.\nlong"),
            WorkerDied,
            "low on memory.",
        ),
        (NodeDiedError("node 7 is gone"), WorkerDied, "node 7 is gone"),
        (LocalRayletDiedError(), WorkerDied, "raylet"),
        (OutOfDiskError("file system is full"), WorkerFailed, "full Make room there."),
    ],
)
def test_what_ray_itself_meets_is_a_death_or_a_failure_and_no_bug(
    error: RayError, kind: type[Exception], says: str
) -> None:
    ranks: Any = object.__new__(RayRanks)
    ranks.role, ranks.where = "policy", []

    async def fail() -> None:
        raise error

    with pytest.raises(kind, match=r"the policy worker of rank 3 does not answer: ") as caught:
        asyncio.run(ranks._one(3, fail()))
    assert says in str(caught.value) and "\n" not in str(caught.value)


class Ref:
    """As Ray's: it can be awaited again, and its future is another thread's."""

    def __init__(self, after: float, error: Exception | None = None):
        self._future: Future[str] = Future()
        self.timer = Timer(after, self._end, [error])
        self.timer.daemon = True
        self.timer.start()

    def _end(self, error: Exception | None) -> None:
        if error:
            self._future.set_exception(error)
        elif not self._future.cancelled():
            self._future.set_result("done")

    def future(self) -> Future[str]:
        return self._future

    def __await__(self) -> Generator[Any, None, str]:
        return asyncio.wrap_future(self._future).__await__()


def two_ranks() -> Any:
    ranks: Any = object.__new__(RayRanks)
    ranks.role, ranks.where, ranks.several_nodes = "policy", ["pid 7 on node 10.0.0.1", "pid 9 on node 10.0.0.2"], True
    return ranks


def closed() -> Ref:
    return Ref(0, RayTaskError("call", "Connection closed by peer", RuntimeError()))


def test_of_a_rank_that_died_the_others_may_know_first() -> None:
    ranks = two_ranks()
    with pytest.raises(WorkerDied, match=r"rank 1 \(pid 9 on node 10\.0\.0\.2\) died"):
        asyncio.run(ranks._all([closed(), Ref(0.05, ActorDiedError())]))
    with pytest.raises(WorkerFailed, match="Connection closed by peer"):
        asyncio.run(ranks._all([closed(), closed()]))  # all have failed: nothing is waited for


def test_the_first_failure_ends_the_wait() -> None:
    begin, late = time.monotonic(), Ref(20)
    with pytest.raises(WorkerDied, match="rank 1"):
        asyncio.run(two_ranks()._all([late, Ref(0.05, ActorDiedError())], "update"))
    assert time.monotonic() - begin < 10
    assert not PULSE.report().doing


def test_while_some_have_answered_the_others_are_waited_for() -> None:
    async def look() -> tuple[list[str], list[str]]:
        call = asyncio.ensure_future(two_ranks()._all([Ref(0), Ref(1.0)], "update"))
        await asyncio.sleep(0.3)
        return [f"{one.what} of {one.whom}" for one in PULSE.report().doing], await call

    assert asyncio.run(look()) == (["update of policy 1"], ["done", "done"])
    assert not PULSE.report().doing


def test_a_cancelled_call_waits_for_nobody(caplog: pytest.LogCaptureFixture) -> None:
    slow = Ref(0.3)

    async def cancel() -> None:
        call = asyncio.ensure_future(two_ranks()._all([slow, slow], "update"))
        await asyncio.sleep(0.05)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert not PULSE.report().doing

    asyncio.run(cancel())
    slow.timer.join()  # it comes when nobody waits any more, and the loop is closed
    assert not caplog.records
