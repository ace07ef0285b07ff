"""Workers of one rank that are closed at the end of a test, and the folders of their models."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
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


@pytest.fixture(scope="session")
def scorer_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folders of tiny reward models as transformers saves them."""
    from tests.unit.tiny import save_scorer

    made: dict[tuple[str, str], Path] = {}

    def folder(name: str, kind: str = "SequenceClassification") -> Path:
        if (name, kind) not in made:
            made[name, kind] = save_scorer(name, tmp_path_factory.mktemp(name), kind)
        return made[name, kind]

    return folder


@pytest.fixture(scope="session")
def locate(model_folder, vision_folder, scorer_folder, tmp_path_factory) -> Callable[[Any], Any]:
    """Replace the names of tiny models in a case by their folders."""
    from tests.unit.workers.models import SIZES, save_small_model  # imports torch
    from tests.vision.models import FAMILIES

    @functools.cache
    def find(name: str, role: str = "") -> str:
        if name in SIZES:
            return str(save_small_model(name, tmp_path_factory.mktemp(name)))
        folder = scorer_folder if role == "reward_model" else vision_folder if name in FAMILIES else model_folder
        return name if not name or "/" in name else str(folder(name))

    def locate_models(case: Any) -> Any:
        teacher = dict(case.teacher)
        if "models" in teacher:
            teacher["models"] = {name: {"path": find(model["path"])} for name, model in teacher["models"].items()}
        others = {"teacher_folder": find(case.teacher_folder), "server_folder": find(case.server_folder)}
        return replace(case, folder=find(case.folder, case.role), teacher=teacher, **others)

    return locate_models


@pytest.fixture
def start(locate, close_later) -> Callable[..., tuple[Any, Columns]]:
    """Start a worker for a Case or the name of a tiny model, and load its batch. Returns it and its columns."""
    from tests.unit.workers.training import Case, make_batch, make_columns, make_worker  # imports torch

    def start_worker(case: Any = "qwen3", arguments: Any = (), **fields: Any) -> tuple[Any, Columns]:
        case = locate(replace(case, **fields) if isinstance(case, Case) else Case(case, **fields))
        worker, batch = close_later(make_worker(case, **dict(arguments))), make_batch(case)
        worker.load_batch(batch.rank_batches[0])
        return worker, make_columns(case, batch)

    return start_worker
