"""Workers in forked processes: results, errors, deaths, reports while a worker computes, and calls of engines."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alphaapollo.controller.errors import EngineCoreDied, WorkerDied, WorkerFailed
from alphaapollo.controller.placement import Placement
from alphaapollo.controller.process_ranks import ProcessRanks, call_engines_of_run
from alphaapollo.engines.types import EngineDied, EngineError
from alphaapollo.processes.watchdog import wait_for_exit

DEADLINE = 600


class Worker:
    """Worker of a rank, which is also an engine."""

    def __init__(self, rank: int):
        self.rank, self.engine, self.updates = rank, self, []

    def update(self, name: str) -> None:
        if name == "refused":
            raise RuntimeError("no such weight")
        if name == "dead":
            raise EngineDied("core")
        self.updates.append(f"{name} of {self.rank}")


def no_engines(*_: object) -> None:
    raise AssertionError


def use(role: str, size: int, body: Callable[[ProcessRanks[Worker]], Coroutine[Any, Any, None]]) -> None:
    """Start `size` workers, run `body` with them, and end them."""

    async def main() -> None:
        ranks: ProcessRanks[Worker] = ProcessRanks(role, size, no_engines)
        try:
            located = await ranks.locate_workers()
            assert (
                located[0].address.startswith("tcp://127.0.0.1:")
                and len({location.pid for location in located}) == size
            )
            environments = [{"RANK_OF_TEST": str(rank)} for rank in range(size)]
            await ranks.start([lambda rank=rank: Worker(rank) for rank in range(size)], environments)
            await body(ranks)
        finally:
            await ranks.close()
        for process in ranks.processes:
            wait_for_exit(process.pid)

    asyncio.run(main())


def test_results_arguments_and_environments_of_each_rank() -> None:
    async def body(ranks: ProcessRanks[Worker]) -> None:
        here, rows = os.getcwd(), np.arange(5)
        results = await ranks.call(lambda worker: (worker.rank, os.environ["RANK_OF_TEST"], os.getcwd(), os.getsid(0)))
        assert [result[:3] for result in results] == [(0, "0", here), (1, "1", here)]
        assert os.getsid(0) not in {result[3] for result in results}  # Ctrl-C in the terminal does not reach them
        assert await ranks.call_with_items(lambda worker, item: item.sum() + worker.rank, [rows, rows]) == [10, 11]
        assert await ranks.call_rank(1, lambda worker, a, b: asyncio.sleep(0.01, a + b), 3, 4) == 7
        assert await ranks.call_rank(0, lambda worker: Path(f"/proc/{os.getpid()}/cmdline").read_text()[:21]) == (
            "alphaapollo::policy 0"
        )

    use("policy", 2, body)


def test_errors_name_the_worker() -> None:
    worker = "the policy worker of rank 0 failed"
    cases: list[tuple[Exception | None, type[Exception], str]] = [
        (ValueError("use 32"), ValueError, "use 32"),
        (EngineDied("core"), EngineCoreDied, f"{worker}: core"),
        (OSError("disk full"), WorkerFailed, f"{worker}: disk full"),
        (KeyError("x"), WorkerFailed, f"{worker}, which is a bug:\nTraceback"),
        (None, WorkerFailed, "cannot pickle"),  # of the result
    ]

    def fail(worker: Worker, cause: Exception | None) -> Any:
        if cause:
            raise cause
        return threading.Lock()

    async def body(ranks: ProcessRanks[Worker]) -> None:
        for cause, kind, says in cases:
            with pytest.raises(kind) as caught:
                await ranks.call_rank(0, fail, cause)
            assert type(caught.value) is kind and says in str(caught.value)

    use("policy", 1, body)


def test_a_computing_worker_reports_and_a_killed_one_is_named() -> None:
    """The other rank waits in the same call, as in a collective; later calls fail with the same error."""

    async def body(ranks: ProcessRanks[Worker]) -> None:
        pids = [process.pid for process in ranks.processes]
        call = asyncio.ensure_future(ranks.call(lambda worker: time.sleep(600)))
        await asyncio.sleep(0.1)
        reports = await asyncio.to_thread(ranks.collect_reports, 60)
        assert [report.worker for report in reports] == ["policy 0", "policy 1"]
        assert [report.processes[0].pid for report in reports] == pids and not reports[1].stacks
        reports = await asyncio.to_thread(ranks.collect_reports, 60, True)
        assert all("<lambda>" in report.stacks for report in reports)
        os.kill(pids[0], signal.SIGSTOP)  # it takes no calls, which does not block the driver
        large = asyncio.ensure_future(ranks.call_rank(0, lambda worker, item: None, np.zeros(10**7)))
        await asyncio.sleep(0.1)
        assert (await asyncio.to_thread(ranks.collect_reports, 0.1))[0].ticks is None
        os.kill(pids[0], signal.SIGCONT)
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(WorkerDied, match=rf"policy worker of rank 1 \(pid {pids[1]}\) died: SIGKILL"):
            await call
        with pytest.raises(WorkerDied, match=r"rank 1 .* died: SIGKILL"):
            await ranks.call_rank(1, lambda worker: worker.rank)
        large.cancel()

    use("policy", 2, body)


def test_the_policy_calls_all_engines_through_the_driver() -> None:
    async def with_engines(engines: ProcessRanks[Worker]) -> None:
        async def body(policy: ProcessRanks[Worker]) -> None:
            await policy.call(lambda worker: call_engines_of_run("update", "layer"))
            assert await engines.call(lambda worker: worker.updates) == [["layer of 0"], ["layer of 1"]]
            for name, kind in {"refused": EngineError, "dead": EngineDied}.items():
                caught = await policy.call_rank(0, catch_engine_error, name)
                assert type(caught) is kind and "rollout worker of rank" in str(caught)  # the first that failed

        ranks: ProcessRanks[Worker] = ProcessRanks("policy", 1, engines.call_engines)
        await ranks.locate_workers()
        await ranks.start([lambda: Worker(0)], [{}])
        await body(ranks)
        await ranks.close()

    use("rollout", 2, with_engines)


def catch_engine_error(worker: Worker, name: str) -> Exception | None:
    try:
        call_engines_of_run("update", name)
    except EngineError as error:
        return error
    return None


def test_workers_end_with_the_driver() -> None:
    """A driver that is killed closes its connections."""
    code = (
        "import asyncio, os, signal\n"
        "from alphaapollo.controller.process_ranks import ProcessRanks\n"
        "async def main():\n"
        "    ranks = ProcessRanks('policy', 1, print)\n"
        "    await ranks.locate_workers()\n"
        "    print(ranks.processes[0].pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    wait_for_exit(int(done.stdout))


@pytest.mark.parametrize(
    ("colocate", "tensor_parallel", "policy", "engines"),
    [(True, 2, ["4", "5", "6", "7"], ["4,5", "6,7"]), (False, 1, ["4", "5", "6", "7"], ["8", "9"])],
)
def test_gpus_of_ranks_and_engines(colocate: bool, tensor_parallel: int, policy: list[str], engines: list[str]) -> None:
    placement = Placement(
        device="cuda", ranks_per_node=4, num_engines=2, tensor_parallel=tensor_parallel, colocate=colocate
    )
    gpus = ["4", "5", "6", "7", "8", "9"]
    for role, expected in {"policy": policy, "critic": policy, "rollout": engines}.items():
        assert [variables["CUDA_VISIBLE_DEVICES"] for variables in placement.assign_gpus(role, gpus)] == expected
    assert Placement(device="cpu", num_engines=2).assign_gpus("rollout", []) == [{}, {}]
