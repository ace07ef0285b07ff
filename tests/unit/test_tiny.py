"""Processes of ranks run one function after the other, and are replaced if one fails."""

from __future__ import annotations

import os
import threading
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from alphaapollo.models import sharding
from tests.unit.tiny import _start_rank, run_ranks


def describe(rank: int, num_ranks: int, address: str, *arguments: Any) -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "arguments": (rank, num_ranks, *arguments),
        "state": (os.environ.get("CHANGED"), sharding.MIN_UNIT, dist.is_initialized(), torch.get_num_threads()),
        "drawn": torch.rand(1).item(),
    }


def change_state(rank: int, num_ranks: int, address: str) -> int:
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=num_ranks)
    os.environ["CHANGED"], sharding.MIN_UNIT = "yes", 0
    torch.set_num_threads(2)
    torch.manual_seed(5)
    total = torch.tensor(rank + 1)
    dist.all_reduce(total)
    return int(total)


def fail(rank: int, num_ranks: int, address: str, how: str) -> None:
    if rank == 0 or how == "hang":
        threading.Event().wait()
    if how == "raise":
        raise ValueError("the second rank is wrong")
    os._exit(7)


def test_ranks_are_kept_and_a_function_does_not_see_the_state_of_another() -> None:
    before = run_ranks(describe, 2, "first")
    assert [rank.pop("arguments") for rank in before] == [(0, 2, "first"), (1, 2, "first")]
    for _ in range(2):  # each time with its own process group
        assert run_ranks(change_state, 2) == [3, 3]
    after, fresh = run_ranks(describe, 2), run_ranks(describe, 2, fresh=True)
    assert before == [{name: rank[name] for name in ("pid", "state", "drawn")} for rank in after]
    assert not {rank["pid"] for rank in fresh} & {rank["pid"] for rank in after}
    assert [rank["pid"] for rank in run_ranks(describe, 2)] == [rank["pid"] for rank in after]


def test_the_fork_server_can_be_stopped_while_ranks_are_kept() -> None:
    """It ends when all copies of a pipe are closed, and `_stop()` waits for it."""
    (rank,) = run_ranks(describe, 1)
    pipe = os.readlink(f"/proc/self/fd/{forkserver._forkserver._forkserver_alive_fd}")
    assert pipe not in [os.readlink(file) for file in Path(f"/proc/{rank['pid']}/fd").iterdir()]


@pytest.mark.parametrize(
    ("how", "fact", "codes"),
    [
        ("raise", "ValueError: the second rank", "[None, 1]"),
        ("die", None, "[None, 7]"),
        ("hang", "0.5 s", "[None, None]"),
    ],
)
def test_a_failure_is_reported_and_later_calls_get_other_processes(how: str, fact: str | None, codes: str) -> None:
    pids = {rank["pid"] for rank in run_ranks(describe, 2)}
    with pytest.raises((AssertionError, EOFError), match=fact) as error:
        run_ranks(fail, 2, how, timeout=0.5 if how == "hang" else 90.0)
    assert error.value.__notes__[0].endswith(codes)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    assert not pids & {rank["pid"] for rank in run_ranks(describe, 2)}


def test_an_idle_rank_ends_when_its_pipe_is_closed() -> None:
    """As it is when pytest ends, however that happens."""
    process, connection = _start_rank(is_kept=True)
    connection.close()
    assert wait([process.sentinel], 60) and process.exitcode == 0
