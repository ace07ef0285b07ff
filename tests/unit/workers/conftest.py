"""Workers of one rank that are closed at the end of a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from alphaapollo.batching.batch import Columns


@pytest.fixture
def close_later() -> Iterator[Callable[[Any], Any]]:
    """Close a worker at the end of the test."""
    workers: list[Any] = []

    def register(worker: Any) -> Any:
        workers.append(worker)
        return worker

    yield register
    for worker in workers:
        worker.close()


@pytest.fixture
def start(model_folder, close_later) -> Callable[..., tuple[Any, Columns]]:
    """Start a policy worker for a Case or the name of a tiny model, and load its batch. Returns it and its columns."""
    from tests.unit.workers.training import Case, make_batch, make_columns, make_worker  # imports torch

    def start_worker(case: Any = "qwen3", ref: bool = False, arguments: Any = (), **fields: Any) -> tuple[Any, Columns]:
        case = replace(case, **fields) if isinstance(case, Case) else Case(str(model_folder(case)), **fields)
        worker = close_later(make_worker(case, 0, 1, "", **dict(arguments)))
        batch = make_batch(case, 1)
        worker.load_batch(batch.rank_batches[0])
        return worker, make_columns(case, batch, 0, ref=ref)

    return start_worker
