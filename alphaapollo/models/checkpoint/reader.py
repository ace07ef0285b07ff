"""Reading a checkpoint without running what is in it: torch's readers unpickle, and a pickle may name any function.

Here a file may name only what torch's own writer puts into one: no checkpoint, wherever it comes from, runs code.
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
from torch.distributed.checkpoint import metadata as described
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors

OF_METADATA: Mapping[tuple[str, str], Any] = {
    (kind.__module__, kind.__name__): kind
    for kind in (
        described.Metadata,
        described.MetadataIndex,
        described.StorageMeta,
        described.TensorStorageMetadata,
        described.TensorProperties,
        described.ChunkStorageMetadata,
        described.BytesStorageMetadata,
        described._MEM_FORMAT_ENCODING,
        _StorageInfo,
        torch.Size,
        pathlib.PosixPath,
    )
} | {("torch.serialization", "_get_layout"): torch.serialization._get_layout}
OF_GENERATORS: list[Any] = [np.empty(0).__reduce__()[0], np.ndarray, np.dtype, np.dtypes.UInt32DType]
"""Of numpy's generator, whose state is an array."""


def read_tensors(tensors: dict[str, Any], folder: Path) -> None:
    """Into the nested `tensors`, in place (a collective of all ranks). Raises pickle.UnpicklingError for a file that
    names anything else than a checkpoint's own parts."""
    load_tensors(tensors, storage_reader=_Reader(folder), planner=_Planner())


def read_generators(file: Path) -> dict[str, Any]:
    """States of random number generators, as torch.save wrote them. Raises as read_tensors."""
    with torch.serialization.safe_globals(OF_GENERATORS):
        states: dict[str, Any] = torch.load(file, weights_only=True)
    return states


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> described.Metadata:
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            metadata: described.Metadata = _Unpickler(file).load()
        if metadata.storage_meta is None:
            metadata.storage_meta = described.StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in OF_METADATA:
            return OF_METADATA[module, name]
        if (module, name) == ("builtins", "getattr"):
            return _memory_format
        if module == "torch" and isinstance(kind := getattr(torch, name, None), torch.dtype):
            return kind
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of a checkpoint.")


def _memory_format(kind: Any, name: str) -> Any:
    """Replacement for getattr, with which Python before 3.11.4 pickles a member of an enumeration."""
    if kind is not described._MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(f"it names builtins.getattr of {kind}, which is no part of a checkpoint.")
    return kind[name]


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Figures of the optimizer: numbers, and the names of parameters."""
        torch.load(value, weights_only=True)  # raises where torch's own, which unpickles all, would run something
        value.seek(0)
        super().load_bytes(read_item, value)
