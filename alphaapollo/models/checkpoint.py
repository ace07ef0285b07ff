"""Sharded checkpoints for resuming: snapshot, writer in the background, and a reader that never runs code from a file.

    <folder>/model/       torch.distributed.checkpoint: parameters (with LoRA the adapters only) and optimizer state,
                          loadable by any number of ranks
    <folder>/rank_R.pt    random number generators of rank R
    <folder>/state.json   number of ranks, and the caller's values

runs/checkpoint_folder.py makes checkpoints atomic. models/export.py writes Hugging Face folders.
"""

from __future__ import annotations

import io
import json
import pathlib
import pickle
import random
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import nn
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from alphaapollo.models.sharding import COLLECTIVE_TIMEOUT, reshard
from alphaapollo.runs.old_group_files import ARRAY_FUNCTIONS, Array, DType
from alphaapollo.utils.disk import read_json
from alphaapollo.utils.json_types import JsonObject

_DCP_CLASSES = [kind for kind in vars(dcp).values() if getattr(kind, "__module__", "") == dcp.__name__]
ALLOWED_CLASSES: Mapping[tuple[str, str], object] = {
    (kind.__module__, kind.__name__): kind for kind in (*_DCP_CLASSES, _StorageInfo, torch.Size, pathlib.PosixPath)
} | {("torch.serialization", "_get_layout"): torch.serialization._get_layout}  # in a checkpoint's metadata
ARRAY_CLASSES: list[Any] = [(function, ".".join(name)) for name, function in ARRAY_FUNCTIONS.items()] + [Array, DType]
"""Placeholders for numpy arrays: formats before 3 saved the state of numpy's random number generator as an array."""

Optimizer = torch.optim.Optimizer


@dataclass(frozen=True)
class CheckpointSnapshot:
    """One rank's share of a checkpoint, before it is written to a folder."""

    folder: str
    tensors: dict[str, Any]  # nested: this rank's slices of parameters and optimizer state, as views
    generator_states: dict[str, Any]
    extra_state: JsonObject  # JSON values that `load_snapshot` returns, the same on all ranks


def take_snapshot(
    folder: str, model: nn.Module, optimizers: Sequence[Optimizer], extra_state: JsonObject
) -> CheckpointSnapshot:
    """Take a snapshot of a model's state for a checkpoint in `folder` (a collective). load_snapshot returns
    `extra_state`. `optimizers` is empty for a frozen model."""
    numpy_state = [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state()]
    generator_states = {"python": random.getstate(), "numpy": numpy_state, "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        generator_states["cuda"] = torch.cuda.get_rng_state()
    return CheckpointSnapshot(folder, _collect_tensors(model, optimizers), generator_states, extra_state)


def write_snapshot(snapshot: CheckpointSnapshot, group: dist.ProcessGroup) -> None:
    """Write a snapshot to its folder (a collective over the gloo `group`). Raises OSError, e.g. if the disk is full."""
    path, rank = Path(snapshot.folder), dist.get_rank()
    with explain_write_errors(path):
        path.mkdir(parents=True, exist_ok=True)
        # No copy ahead: torch would use a stream of the first GPU, also on ranks with another GPU.
        files = FileSystemWriter(path / "model", per_thread_copy_ahead=0)
        save_tensors(snapshot.tensors, storage_writer=files, process_group=group)
        torch.save(snapshot.generator_states, path / f"rank_{rank}.pt")
        if rank == 0:
            state = {"world_size": dist.get_world_size(), **snapshot.extra_state}
            (path / "state.json").write_text(json.dumps(state))


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Context manager that converts any error while writing weights to an OSError that names the folder."""
    try:
        yield
    except (OSError, RuntimeError, CheckpointException, SafetensorError) as error:
        existing = next(folder for folder in (path, *path.parents) if folder.exists())
        raise OSError(
            f"cannot write {path}: {_describe_error(error)} ({shutil.disk_usage(existing).free / 2**20:.0f} MiB free). "
            "Free disk space or fix permissions, and run the same command again; a run resumes from its last complete "
            "checkpoint."
        ) from error


def load_snapshot(folder: str, model: nn.Module, optimizers: Sequence[Optimizer]) -> JsonObject:
    """Load a checkpoint, written by any number of ranks, into `model` and `optimizers` (a collective), and return its
    extra state and `world_size`. Random number generators are restored only if the number of ranks is unchanged. Raises
    ValueError if the checkpoint is incomplete or damaged."""
    path = Path(folder)
    reshard(model)
    tensors = _collect_tensors(model, optimizers)
    try:
        state: JsonObject = read_json(path / "state.json")
        read_checkpoint_tensors(tensors, path / "model")
        has_same_ranks = state["world_size"] == dist.get_world_size()
        generators = read_rng_states(path / f"rank_{dist.get_rank()}.pt") if has_same_ranks else None
    except (OSError, RuntimeError, ValueError, LookupError, EOFError, CheckpointException, UnpicklingError) as error:
        raise ValueError(
            f"the checkpoint {folder} cannot be read: {_describe_error(error)}. Resume from another checkpoint."
        ) from error
    # strict=False, because frozen parameters are not saved. read_checkpoint_tensors has checked all other parameters.
    options, parameters = StateDictOptions(strict=False), tensors["model"]
    if not optimizers:
        set_model_state_dict(model, parameters, options=options)
    else:
        states = tensors["optimizer"]
        set_state_dict(model, optimizers, model_state_dict=parameters, optim_state_dict=states, options=options)
    if generators:
        random.setstate(generators["python"])
        np.random.set_state(generators["numpy"])
        torch.set_rng_state(generators["torch"])
        if torch.cuda.is_available():
            torch.cuda.set_rng_state(generators["cuda"])
    return state


def _collect_tensors(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    if not optimizers:
        return {"model": _select_saved_parameters(model, get_model_state_dict(model))}
    if not optimizers[0].state:
        get_state_dict(model, optimizers)  # creates the state by a step with zero gradients, which must not count
        for state in (state for optimizer in optimizers for state in optimizer.state.values() if "step" in state):
            state["step"].zero_()
    parameters, states = get_state_dict(model, optimizers)
    return {"model": _select_saved_parameters(model, parameters), "optimizer": states}


def _select_saved_parameters(model: nn.Module, tensors: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters that a checkpoint contains: only the trained ones if a part is frozen (with LoRA, or a
    frozen vision tower), otherwise all."""
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    is_partial = any(trained.values()) and not all(trained.values())
    return {name: tensors[name] for name in sorted(trained) if trained[name]} if is_partial else tensors


def _describe_error(error: BaseException) -> str:
    """Return one line for an error; for a failed collective, the error of the first rank that failed."""
    if isinstance(error, CheckpointException) and error.failures:
        cause = next(iter(error.failures.values()))[0]
        return _describe_error(cause)
    return str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__


class CheckpointWriter:
    """Writer of one rank's share of each checkpoint: in a thread while training continues (in_background), or in
    `start`. All ranks must start the same checkpoints in the same order."""

    def __init__(self, in_background: bool):
        self._group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
        self._thread = ThreadPoolExecutor(1, "checkpoint") if in_background else None
        has_gpu = torch.cuda.is_available()  # copies are page-locked on a GPU machine
        self._stager = DefaultStager(
            StagingOptions(has_gpu, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=has_gpu)
        )
        self.save_future: Future[float] = Future()  # of the last checkpoint: writing time in seconds, or OSError
        self.save_future.set_result(0.0)

    def start(self, snapshots: Sequence[CheckpointSnapshot]) -> None:
        """Start to write a checkpoint of one or more models (a collective). The previous one must be complete."""
        assert self.save_future.done(), "the previous checkpoint must be complete"
        if self._thread:
            copies = [
                replace(part, tensors=cast("dict[str, object]", self._stager.stage(part.tensors))) for part in snapshots
            ]
            self.save_future = self._thread.submit(self._write_snapshots, copies)
        else:
            self.save_future = Future()
            self.save_future.set_result(self._write_snapshots(snapshots))

    def close(self) -> None:
        """Wait until the last checkpoint is written, then stop the thread."""
        if self._thread:
            self._thread.shutdown()
        self._stager.close()

    def _write_snapshots(self, snapshots: Sequence[CheckpointSnapshot]) -> float:
        started = time.perf_counter()
        for snapshot in snapshots:
            write_snapshot(snapshot, self._group)
        return time.perf_counter() - started


def read_checkpoint_tensors(tensors: dict[str, object], folder: Path) -> None:
    """Read the tensors of a checkpoint folder into the nested dict `tensors`, in place (a collective). Raises
    pickle.UnpicklingError if a file uses a class that is not allowed in a checkpoint."""
    load_tensors(tensors, storage_reader=_RestrictedUnpickleReader(folder), planner=_RestrictedUnpicklePlanner())


def read_all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Read all tensors of a checkpoint folder into this process: `model.<parameter>` and, if it was trained,
    `optimizer.state.<parameter>.<moment>`. Raises UnpicklingError as read_checkpoint_tensors does."""
    tensors: dict[str, Any] = {}
    for name, stored in _RestrictedUnpickleReader(folder).read_metadata().state_dict_metadata.items():
        if isinstance(stored, dcp.TensorStorageMetadata):
            tensors[name] = torch.empty(stored.size, dtype=stored.properties.dtype)
    reader, planner = _RestrictedUnpickleReader(folder), _RestrictedUnpicklePlanner()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the warning says that no other process takes part
        load_tensors(tensors, storage_reader=reader, planner=planner, no_dist=True)
    return tensors


def read_rng_states(file: Path) -> dict[str, Any]:
    """Read states of random number generators from a file of torch.save. Raises UnpicklingError for other content."""
    with torch.serialization.safe_globals(ARRAY_CLASSES):
        states: dict[str, Any] = torch.load(file, weights_only=True)
    return states | {"numpy": tuple(getattr(part, "value", part) for part in states["numpy"])}  # value of an Array


class _RestrictedUnpickleReader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            metadata: dcp.Metadata = _RestrictedUnpickler(file).load()
        if metadata.storage_meta is None:
            metadata.storage_meta = dcp.StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _RestrictedUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if (module, name) in ALLOWED_CLASSES:
            return ALLOWED_CLASSES[module, name]
        if (module, name) == ("builtins", "getattr"):
            return _get_memory_format
        if module == "torch" and isinstance(kind := getattr(torch, name, None), torch.dtype):
            return kind
        raise pickle.UnpicklingError(f"the file uses {module}.{name}, which is not allowed in a checkpoint")


def _get_memory_format(enum: object, name: str) -> object:
    """Return a member of torch's memory format enum. Unpickling calls it instead of getattr (old Pythons)."""
    if enum is not dcp._MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(f"the file calls getattr on {enum}, which is not allowed in a checkpoint")
    return enum[name]


class _RestrictedUnpicklePlanner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load optimizer values that are not tensors: numbers and parameter names."""
        torch.load(value, weights_only=True)  # raises if torch's own loader, which unpickles everything, would run code
        value.seek(0)
        super().load_bytes(read_item, value)
