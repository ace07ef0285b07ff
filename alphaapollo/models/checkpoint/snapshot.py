"""Sharded checkpoints to resume from (for Hugging Face folders see export.py).

    <folder>/model/       torch.distributed.checkpoint: parameters (with LoRA the adapters alone) and optimizer state,
                          loadable by any number of ranks
    <folder>/rank_R.pt    random number generators of rank R
    <folder>/state.json   the number of ranks, and the caller's own figures

checkpoint_folder.py makes it atomic: begin gives a temporary folder, finish names it when all is written.
checkpoint_writer.py writes a snapshot behind the training.
"""

from __future__ import annotations

import json
import pickle
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from alphaapollo.models.checkpoint.reader import read_generators, read_tensors
from alphaapollo.models.sharding import reshard

Optimizer = torch.optim.Optimizer


@dataclass(frozen=True)
class Snapshot:
    """What one rank writes into one folder."""

    folder: str
    tensors: dict[str, Any]  # nested: its slices of parameters and optimizer state, sharing their memory until copied
    generators: dict[str, Any]
    figures: dict[str, Any]  # JSON values that come back from `load`, the same on all ranks


def take_snapshot(folder: str, model: nn.Module, optimizer: Optimizer | None, figures: dict[str, Any]) -> Snapshot:
    """The present state of a model (a collective of all ranks). `optimizer`: None for a frozen one."""
    return Snapshot(folder, _tensors(model, optimizer), _generators(), figures)


def write_snapshot(snapshot: Snapshot, group: dist.ProcessGroup) -> None:
    """Write a checkpoint (a collective of all ranks over `group`, gloo's).

    Raises OSError that names the folder, e.g. for a full disk.
    """
    path = Path(snapshot.folder)
    rank = dist.get_rank()
    try:
        path.mkdir(parents=True, exist_ok=True)
        # Nothing is fetched ahead: torch would do that on a stream of the first GPU, whichever this rank's is.
        files = FileSystemWriter(path / "model", per_thread_copy_ahead=0)
        save_tensors(snapshot.tensors, storage_writer=files, process_group=group)
        torch.save(snapshot.generators, path / f"rank_{rank}.pt")
        if rank == 0:
            state = {"world_size": dist.get_world_size(), **snapshot.figures}
            (path / "state.json").write_text(json.dumps(state))
    except (OSError, RuntimeError, CheckpointException) as error:
        raise OSError(
            f"cannot write the checkpoint {path}: {_reason(error)} ({_free_mib(path):.0f} MiB are free there). Make "
            "room; the same command goes on from the last whole checkpoint."
        ) from error


def read_state(path: Path) -> dict[str, Any]:
    """The caller's figures with `world_size`, that of the writer. ValueError: the folder has none that can be read."""
    if not (path / "state.json").is_file():
        raise ValueError(f"{path} is not a checkpoint: it has no state.json. Resume from a folder under checkpoints/.")
    try:
        state: dict[str, Any] = json.loads((path / "state.json").read_text())
        state["world_size"] = int(state["world_size"])
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise ValueError(f"{path / 'state.json'} cannot be read: {error} Resume from another checkpoint.") from error
    return state


def load_snapshot(folder: str, model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    """Read a checkpoint, written by any number of ranks, into `model` and `optimizer` (a collective of all ranks).

    Returns the caller's figures with `world_size`, that of the writer. Generators are restored only if it is the same:
    only then can a run go on bit for bit. Raises ValueError for a folder that is not a whole checkpoint.
    """
    path = Path(folder)
    state = read_state(path)
    reshard(model)
    tensors = _tensors(model, optimizer)
    try:
        read_tensors(tensors, path / "model")
    except (OSError, RuntimeError, CheckpointException, pickle.UnpicklingError) as error:
        raise ValueError(
            f"the checkpoint {folder} cannot be read: {_reason(error)} Resume from another one."
        ) from error
    options = StateDictOptions(strict=False)  # what rests is not among them; what is asked for has been found
    if optimizer is None:
        set_model_state_dict(model, tensors["model"], options=options)
    else:
        set_state_dict(
            model,
            optimizer,
            model_state_dict=tensors["model"],
            optim_state_dict=tensors["optimizer"],
            options=options,
        )
    if state["world_size"] == dist.get_world_size():
        _set_generators(_read_generators(folder))
    return state


def _tensors(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    if optimizer is None:
        return {"model": _kept(model, get_model_state_dict(model))}
    if not optimizer.state:
        get_state_dict(model, optimizer)  # makes a state by a step of zero gradients, and counts it as one
        for state in optimizer.state.values():
            for value in state.values():
                value.zero_()
    parameters, states = get_state_dict(model, optimizer)
    return {"model": _kept(model, parameters), "optimizer": states}


def _kept(model: nn.Module, tensors: dict[str, Any]) -> dict[str, Any]:
    """Of a model that is trained in part (LoRA) that part alone: the rest is what the run began with."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    resting = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    return {name: tensors[name] for name in sorted(trained)} if trained and resting else tensors


def _generators() -> dict[str, Any]:
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _read_generators(folder: str) -> dict[str, Any]:
    file = Path(folder, f"rank_{dist.get_rank()}.pt")
    try:
        return read_generators(file)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{file} cannot be read: {_reason(error)} Resume from another checkpoint.") from error


def _set_generators(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _free_mib(path: Path) -> float:
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    return shutil.disk_usage(existing).free / 2**20


def _reason(error: BaseException) -> str:
    """The first failure of a rank, in a line."""
    if isinstance(error, CheckpointException) and error.failures:
        cause = next(iter(error.failures.values()))[0]
        return _reason(cause)
    return str(error).strip().split("\n")[0] or type(error).__name__
