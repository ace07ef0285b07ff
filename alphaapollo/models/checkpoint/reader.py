"""Checkpoint reader that never runs code from a checkpoint.

torch's readers unpickle files, and a pickle can call any function. This reader accepts only the classes that torch's
checkpoint writer uses.
"""

from __future__ import annotations

import io
import pathlib
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors

METADATA_TYPES = [kind for kind in vars(dcp).values() if getattr(kind, "__module__", "") == dcp.__name__]
METADATA_CLASSES: Mapping[tuple[str, str], Any] = {
    (kind.__module__, kind.__name__): kind for kind in (*METADATA_TYPES, _StorageInfo, torch.Size, pathlib.PosixPath)
} | {("torch.serialization", "_get_layout"): torch.serialization._get_layout}
GENERATOR_CLASSES: list[Any] = [np.empty(0).__reduce__()[0], np.ndarray, np.dtype, np.dtypes.UInt32DType]
"""Classes in the saved state of numpy's random number generator, which is an array."""


def read_checkpoint_tensors(tensors: dict[str, object], folder: Path) -> None:
    """Read the tensors of a checkpoint folder into the nested dict `tensors`, in place (a collective). Raises
    pickle.UnpicklingError if a file uses a class that is not allowed in a checkpoint."""
    load_tensors(tensors, storage_reader=_RestrictedUnpickleReader(folder), planner=_RestrictedUnpicklePlanner())


def read_rng_states(file: Path) -> dict[str, Any]:
    """Read states of random number generators from a file of torch.save. Raises UnpicklingError for other content."""
    with torch.serialization.safe_globals(GENERATOR_CLASSES):
        states: dict[str, Any] = torch.load(file, weights_only=True)
    return states


class _RestrictedUnpickleReader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            metadata: dcp.Metadata = _RestrictedUnpickler(file).load()
        if metadata.storage_meta is None:
            metadata.storage_meta = dcp.StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _RestrictedUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in METADATA_CLASSES:
            return METADATA_CLASSES[module, name]
        if (module, name) == ("builtins", "getattr"):
            return _get_memory_format
        if module == "torch" and isinstance(kind := getattr(torch, name, None), torch.dtype):
            return kind
        raise pickle.UnpicklingError(f"the file uses {module}.{name}, which is not allowed in a checkpoint")


def _get_memory_format(enum: Any, name: str) -> Any:
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
