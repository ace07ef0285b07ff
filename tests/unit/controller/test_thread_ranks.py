"""One rank in a thread of this process: the event loop continues beside it."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from alphaapollo.controller.errors import WorkerDied
from alphaapollo.controller.handles import FinetuningGroup
from alphaapollo.controller.ranks import LocalRanks
from alphaapollo.engines.types import EngineDied


class Worker:
    """Computes until `let` is set."""

    def __init__(self) -> None:
        self.threads = {threading.get_ident()}
        self.let = threading.Event()
        self.saved: Future[float] = Future()
        self.closed = False

    def step(self, batch: int, skip_bad_step: bool) -> tuple[int, bool]:
        self.threads.add(threading.get_ident())
        assert self.let.wait(10)
        return batch, skip_bad_step

    def get_save_future(self) -> Future[float]:
        return self.saved

    def close(self) -> None:
        self.closed = True


def test_a_worker_runs_in_one_thread_and_the_loop_continues() -> None:
    async def main() -> None:
        thread = ThreadPoolExecutor(1)
        ranks = LocalRanks(thread.submit(Worker).result(), "trainer", thread)
        group: FinetuningGroup[Any] = FinetuningGroup(ranks)  # type: ignore[arg-type]
        worker = ranks.worker
        step = asyncio.ensure_future(group.step([7], True))
        written = asyncio.ensure_future(group.ranks.call(lambda one: asyncio.sleep(0, 5)))
        await asyncio.sleep(0.01)
        assert not step.done()
        worker.let.set()
        assert await step == (7, True) and await written == [5]
        worker.saved.set_result(2.5)
        assert await group.wait_for_save() == 2.5
        await ranks.close()
        assert worker.closed and len(worker.threads) == 1 and threading.get_ident() not in worker.threads
        assert ranks.role == "trainer"

    asyncio.run(main())


def test_errors_of_the_worker_are_raised() -> None:
    def fails(error: Exception) -> Any:
        raise error

    async def main() -> None:
        ranks = LocalRanks(SimpleNamespace(close=lambda: None), "trainer", ThreadPoolExecutor(1))
        with pytest.raises(FloatingPointError, match="nan"):
            await ranks.call_rank(0, lambda _: fails(FloatingPointError("nan")))
        with pytest.raises(WorkerDied, match="core"):
            await ranks.call_rank(0, lambda _: fails(EngineDied("core")))
        await ranks.close()

    asyncio.run(main())
