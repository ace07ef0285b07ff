"""A checkpoint is written while training continues, and has the state at the time of the save."""

from __future__ import annotations

import resource
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alphaapollo.models import checkpoint
from alphaapollo.models.checkpoint import CheckpointWriter
from alphaapollo.models.sharding import full_tensor
from tests.unit.tiny import run_ranks
from tests.unit.workers.training import Case, assert_close, make_batch, make_columns, make_worker, parameters


def save_and_continue(rank: int, num_ranks: int, address: str, case: Case, folder: str) -> dict[str, np.ndarray]:
    """Save two checkpoints. Before each is written, weights, moments and reference change, and while it is written the
    ranks train. The first is also written in the foreground. Returns the weights at the second."""
    gate, write = threading.Event(), checkpoint.write_snapshot

    def write_later(*arguments: Any) -> None:
        gate.wait()
        write(*arguments)

    worker = make_worker(case, rank, num_ranks, address, saves_in_background=True)
    batch = make_batch(case, num_ranks)
    columns = make_columns(case, batch, rank)
    worker.load_batch(batch.rank_batches[rank])
    at_once = CheckpointWriter(in_background=False)
    for name in ("first", "second"):
        worker.update(columns)
        if worker.find_plugin("reference") is not None:
            worker.reset_reference_and_optimizer()
            worker.update(columns)
        saved = parameters(worker)
        if name == "first":
            at_once.start([worker.state.snapshot(f"{folder}/at_once")])
        gate.clear()
        checkpoint.write_snapshot = write_later
        worker.save(f"{folder}/{name}")
        worker.offload()
        assert not worker.get_save_future().done()
        with pytest.raises(AssertionError, match="previous checkpoint"):
            worker.save(f"{folder}/another")
        worker.update(columns)
        if worker.find_plugin("reference") is not None:
            worker.reset_reference_and_optimizer()
        worker.update(columns)
        gate.set()
        worker.update(columns)
        assert worker.get_save_future().result() > 0
        checkpoint.write_snapshot = write
    worker.close()
    return saved


def load(rank: int, num_ranks: int, address: str, case: Case, folder: str) -> dict[str, np.ndarray]:
    worker = make_worker(case, rank, num_ranks, address)
    worker.load(folder)
    found = parameters(worker)
    if worker.find_plugin("reference") is not None:
        found |= {
            f"reference {name}": full_tensor(p).numpy().copy()
            for name, p in worker.find_plugin("reference").model.named_parameters()
        }
    worker.close()
    return found


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_later_steps_do_not_change_a_checkpoint(model_folder: Any, tmp_path: Path, lora_rank: int) -> None:
    case = Case(str(model_folder("qwen3")), {"optim": {"lr": 0.01}}, lora_rank=lora_rank)
    case = replace(case, needs_reference=not lora_rank, mini_batch_size=5)
    saved = run_ranks(save_and_continue, 2, case, str(tmp_path), timeout=300)[0]
    first, at_once = tmp_path / "first", tmp_path / "at_once"
    files = sorted(at_once.glob("model/*.distcp")) + sorted(at_once.glob("*.*"))
    assert len(files) == 2 * 2 + 1
    for file in files:
        assert (first / file.relative_to(at_once)).read_bytes() == file.read_bytes(), file
    found = run_ranks(load, 2, case, str(tmp_path / "second"), timeout=300)[0]
    assert_close({name: found[name] for name in saved}, saved, atol=0, rtol=0)
    if not lora_rank:
        assert any(np.abs(found[f"reference {name}"] - value).max() > 0 for name, value in saved.items())


def test_the_error_of_a_full_disk_names_the_folder(start, tmp_path: Path) -> None:
    """Saving in the background: the error is raised by the result."""
    worker, _ = start("llama", arguments={"saves_in_background": True})
    at_once, _ = start("llama")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        worker.save(str(tmp_path / "saved"))
        with pytest.raises(OSError, match=f"{tmp_path}/saved: .* MiB free"):
            worker.get_save_future().result()
        for write, name in ((at_once.save, "at_once"), (worker.export, "model")):
            with pytest.raises(OSError, match=f"{tmp_path}/{name}"):
                write(str(tmp_path / name))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    worker.save(str(tmp_path / "again"))
    worker.get_save_future().result()
    worker.load(str(tmp_path / "again"))
