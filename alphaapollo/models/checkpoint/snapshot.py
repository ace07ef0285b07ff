"""Sharded checkpoints for resuming. models/export/ writes Hugging Face folders.

    <folder>/model/       torch.distributed.checkpoint: parameters (with LoRA the adapters only) and optimizer state,
                          loadable by any number of ranks
    <folder>/rank_R.pt    random number generators of rank R
    <folder>/state.json   number of ranks, and the caller's values

runs/checkpoint_folder.py makes checkpoints atomic, writer.py writes them in the background.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
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

from alphaapollo.models.checkpoint.reader import read_checkpoint_tensors, read_rng_states
from alphaapollo.models.sharding import reshard
from alphaapollo.utils.json_types import JsonObject

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
    generator_states = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        generator_states["cuda"] = torch.cuda.get_rng_state()
    return CheckpointSnapshot(folder, _collect_tensors(model, optimizers), generator_states, extra_state)


def write_snapshot(snapshot: CheckpointSnapshot, group: dist.ProcessGroup) -> None:
    """Write a snapshot to its folder (a collective over the gloo `group`). Raises OSError, e.g. if the disk is full."""
    path = Path(snapshot.folder)
    rank = dist.get_rank()
    try:
        path.mkdir(parents=True, exist_ok=True)
        # No copy ahead: torch would use a stream of the first GPU, also on ranks with another GPU.
        files = FileSystemWriter(path / "model", per_thread_copy_ahead=0)
        save_tensors(snapshot.tensors, storage_writer=files, process_group=group)
        torch.save(snapshot.generator_states, path / f"rank_{rank}.pt")
        if rank == 0:
            state = {"world_size": dist.get_world_size(), **snapshot.extra_state}
            (path / "state.json").write_text(json.dumps(state))
    except (OSError, RuntimeError, CheckpointException) as error:
        existing = next(folder for folder in (path, *path.parents) if folder.exists())
        free = shutil.disk_usage(existing).free / 2**20
        raise OSError(
            f"cannot write the checkpoint {path}: {_describe_error(error)} ({free:.0f} MiB free). Free disk space "
            "and run the same command again; it resumes from the last complete checkpoint."
        ) from error


def load_snapshot(folder: str, model: nn.Module, optimizers: Sequence[Optimizer]) -> JsonObject:
    """Load a checkpoint, written by any number of ranks, into `model` and `optimizers` (a collective).

    Random number generators are restored only if the number of ranks is unchanged. Resuming is exact only then.

    Returns the saved extra state, and `world_size`, the number of ranks that wrote the checkpoint. Raises ValueError if
    the checkpoint is incomplete or damaged.
    """
    path = Path(folder)
    reshard(model)
    tensors = _collect_tensors(model, optimizers)
    try:
        state: JsonObject = json.loads((path / "state.json").read_text())
        read_checkpoint_tensors(tensors, path / "model")
        is_same_size = state["world_size"] == dist.get_world_size()
        generators = read_rng_states(path / f"rank_{dist.get_rank()}.pt") if is_same_size else None
    except (OSError, RuntimeError, ValueError, LookupError, EOFError, CheckpointException, UnpicklingError) as error:
        raise ValueError(
            f"the checkpoint {folder} cannot be read: {_describe_error(error)}. Resume from another checkpoint."
        ) from error
    # Frozen parameters are not saved; read_checkpoint_tensors has checked the rest.
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
