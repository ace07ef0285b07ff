"""Errors of the driver for a worker's failure over Ray; no Ray is started."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from threading import Timer
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, LocalRayletDiedError, NodeDiedError, OutOfDiskError, RayError, RayTaskError
from ray.exceptions import OutOfMemoryError as RayOutOfMemoryError

from alphaapollo.controller.errors import WorkerDied, WorkerFailed
from alphaapollo.controller.ray_ranks import RayRanks
from alphaapollo.controller.remote_ranks import NODE_DEATH_SECONDS, RemoteRanks
from alphaapollo.utils.heartbeat import HEARTBEAT


class OutOfMemoryError(RuntimeError):
    """Named like torch's."""


def message_of(error: Exception, kind: type[Exception] = WorkerFailed) -> str:
    ranks: Any = object.__new__(RayRanks)
    RemoteRanks.__init__(ranks, "policy", 4)

    async def wait() -> None:
        await ranks._wait_for_call(3, make_call(0, error))

    with pytest.raises(kind) as caught:
        asyncio.run(wait())
    assert "policy worker of rank 3" in str(caught.value)
    return str(caught.value)


def test_out_of_memory_names_the_keys() -> None:
    text = message_of(RayTaskError("call", "", OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")))
    assert "CUDA out of memory. Tried to allocate 2.00 GiB." in text
    assert "ppo_max_token_len_per_gpu" in text and "bug" not in text
    text = message_of(RayTaskError("call", "\x1b[36mray\x1b[39m", RuntimeError("shapes differ")))
    assert "which is a bug" in text and "\x1b" not in text


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (RayOutOfMemoryError("Task was killed: node low on memory.\nlong"), WorkerDied, "low on memory."),
        (NodeDiedError("node 7 is gone"), WorkerDied, "node 7 is gone"),
        (LocalRayletDiedError(), WorkerDied, "raylet"),
        (OutOfDiskError("file system is full"), WorkerFailed, "file system is full"),
    ],
)
def test_errors_of_ray_are_deaths_or_failures_and_not_bugs(error: RayError, kind: type[Exception], says: str) -> None:
    text = message_of(error, kind)
    assert says in text and "\n" not in text


def make_call(after: float | None, error: Exception | None = None) -> Future[str]:
    """Call whose future belongs to another thread. It ends after some seconds; None: when `end` is called."""
    call = Future[str]()
    if after is not None:
        timer = Timer(after, end, [call, error])
        timer.daemon = True
        timer.start()
    return call


def end(call: Future[str], error: Exception | None = None) -> None:
    if error:
        call.set_exception(error)
    elif not call.cancelled():
        call.set_result("done")


def two_ranks() -> Any:
    ranks: Any = object.__new__(RayRanks)
    RemoteRanks.__init__(ranks, "policy", 2)
    ranks.death_seconds = NODE_DEATH_SECONDS
    ranks.process_names = ["pid 7 on node 10.0.0.1", "pid 9 on node 10.0.0.2"]
    return ranks


def closed() -> Future[str]:
    return make_call(0, RayTaskError("call", "Connection closed by peer", RuntimeError()))


def test_a_death_is_raised_before_the_closed_connections_of_other_ranks() -> None:
    ranks = two_ranks()
    with pytest.raises(WorkerDied, match=r"rank 1 \(pid 9 on node 10\.0\.0\.2\)"):
        asyncio.run(ranks._wait_for_all_calls([closed(), make_call(0.05, ActorDiedError())]))
    with pytest.raises(WorkerFailed, match="Connection closed by peer"):
        asyncio.run(ranks._wait_for_all_calls([closed(), closed()]))  # all have failed: no wait


def test_the_first_failure_ends_the_wait() -> None:
    with pytest.raises(WorkerDied, match="rank 1"):
        asyncio.run(two_ranks()._wait_for_all_calls([make_call(None), make_call(0.05, ActorDiedError())], "update"))
    assert not HEARTBEAT.list_active_calls()


def test_a_cancelled_call_does_not_wait(caplog: pytest.LogCaptureFixture) -> None:
    slow = make_call(None)

    async def cancel() -> None:
        call = asyncio.ensure_future(two_ranks()._wait_for_all_calls([slow, slow], "update"))
        await asyncio.sleep(0.05)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert not HEARTBEAT.list_active_calls()

    asyncio.run(cancel())
    end(slow)  # after the loop is closed
    assert not caplog.records
