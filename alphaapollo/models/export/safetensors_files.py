"""Writer of a Hugging Face folder's weight files, which keeps the tensors of at most one file in memory.

Writes model.safetensors, or model-00001-of-00003.safetensors ... and model.safetensors.index.json.
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

FILE_BYTES = 5 * 10**9


class SafetensorsWriter:
    """Writes weights to `folder`. A tensor larger than FILE_BYTES has a file of its own."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._tensors: dict[str, Tensor] = {}  # of the next file
        self._files: list[list[str]] = []  # the names in each
        self._bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a contiguous CPU tensor that shares no memory with others."""
        if self._tensors and sum(one.nbytes for one in self._tensors.values()) + tensor.nbytes > FILE_BYTES:
            self._write()
        self._tensors[name] = tensor

    def close(self) -> None:
        """Write the last file, and the index if there are several files."""
        self._write()
        count = len(self._files)
        if count == 1:
            self._part(0).rename(self._folder / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._files):
            file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            self._part(number).rename(self._folder / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self._bytes}, "weight_map": weight_map}
        (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))

    def _write(self) -> None:
        save_file(self._tensors, self._part(len(self._files)), metadata={"format": "pt"})
        self._files.append(list(self._tensors))
        self._bytes += sum(one.nbytes for one in self._tensors.values())
        self._tensors = {}

    def _part(self, number: int) -> Path:
        return self._folder / f"part-{number:05d}.safetensors"
