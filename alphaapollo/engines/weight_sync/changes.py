"""Copies of the sent weights on nodes without training ranks. A copy receives only what changed since its version.

After a step with a small learning rate, most weights in bfloat16 are unchanged. The files of two versions are compared
word by word. A word is an integer with the bits of one element, so NaN payloads and -0.0 are exact.

    WeightCopy (node of an engine)                    SharedMemorySender (rank 0)
      read(folder, id of the copy's version)       ->   compares the sent files with those of that version
      applies the changes                          <-   SentFiles

The changes name the version that they are relative to. A copy of any other version gets complete files."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

BLOCK = 1 << 16  # words of a block, so that the position of a word in it has 16 bits
_CHUNK = 4 * BLOCK  # words that are compared at a time; they fit into a core's cache


@dataclass(frozen=True)
class FileChanges:
    """Words of a file that differ from the file of an earlier version."""

    counts: np.ndarray  # number of changed words of each block, uint32 [blocks]
    positions: np.ndarray  # of the changed words in their blocks, uint16 [changed words]
    words: np.ndarray  # uint16 or uint32 [changed words]

    @property
    def nbytes(self) -> int:
        return self.counts.nbytes + self.positions.nbytes + self.words.nbytes

    def apply(self, path: Path) -> None:
        """Write the words into the file of the earlier version."""
        starts = np.arange(len(self.counts)) * BLOCK
        np.memmap(path, self.words.dtype, "r+")[np.repeat(starts, self.counts) + self.positions] = self.words


@dataclass(frozen=True)
class SentFiles:
    """Files of one version of the weights, for an engine on another node."""

    version_id: str  # differs for every version that any sender sends
    base_id: str  # version that changes are relative to; empty: all files are complete
    files: dict[str, np.ndarray | FileChanges]  # by name; a complete file is its bytes, uint8 [bytes]


WeightReader = Callable[[str, str], Awaitable[SentFiles]]
"""`read(folder, base_id)`: read the sent folder (WeightUpdate.folder) of rank 0. base_id: version of the caller's copy;
empty: it has none."""


def find_changes(path: Path, base: Path, word_bytes: int) -> FileChanges | None:
    """Compare a file with that of an earlier version. Returns None if the sizes differ, or as soon as the changes are
    at least as large as the part compared so far and as an eighth of the file. word_bytes: size of an element, which
    divides the size of the file."""
    num_bytes, word = path.stat().st_size, np.dtype(f"u{word_bytes}")
    if not base.is_file() or base.stat().st_size != num_bytes:
        return None
    counts, positions, words, changed_bytes = [], [], [], 0
    with path.open("rb") as new, base.open("rb") as old:
        while (chunk := np.fromfile(new, word, _CHUNK)).size:
            changed = np.flatnonzero(chunk != np.fromfile(old, word, _CHUNK))
            counts.append(np.bincount(changed // BLOCK, minlength=-(-chunk.size // BLOCK)).astype(np.uint32))
            positions.append(changed.astype(np.uint16))  # the low 16 bits: the position in the block
            words.append(chunk[changed])
            changed_bytes += counts[-1].nbytes + positions[-1].nbytes + words[-1].nbytes
            if changed_bytes >= max(new.tell(), num_bytes // 8):
                return None
    return FileChanges(np.concatenate(counts), np.concatenate(positions), np.concatenate(words))


@dataclass
class WeightCopy:
    """Copy of the sent weights in the shared memory of a node without training ranks, for one engine. The copy remains
    until the next version is sent. Changes of that version are written into the files of the copy."""

    folder: Path  # belongs to this copy
    read: WeightReader
    keeps_last: bool = False  # keep the last version while the next one is loaded, for engines that load it again
    copied_bytes: int = field(default=0, init=False)  # of the last version
    _path: Path | None = field(default=None, init=False)
    _version_id: str = field(default="", init=False)  # of the files in _path; empty: they are not complete

    async def update(self, name: str) -> Path:
        """Copy the sent folder `name`, and return the path of the copy."""
        base_id = self._version_id if self._path and self._path.is_dir() else ""
        self._version_id = ""  # after an error, the next version is copied completely
        sent = await self.read(name, base_id)
        if sent.base_id not in ("", base_id):
            raise ValueError(f"received changes relative to weights {sent.base_id!r}, but this copy has {base_id!r}.")
        await asyncio.to_thread(self._write, sent, self.folder / name)
        self.copied_bytes = sum(content.nbytes for content in sent.files.values())
        self._path, self._version_id = self.folder / name, sent.version_id
        return self._path

    def _write(self, sent: SentFiles, target: Path) -> None:
        needs_current_files = self.keeps_last or bool(sent.base_id)
        earlier_copies = [*self.folder.iterdir()] if self.folder.is_dir() else []
        for copy in earlier_copies:
            if copy != self._path or not needs_current_files:
                shutil.rmtree(copy)
        if sent.base_id and self._path:
            self._path.rename(target)
        target.mkdir(parents=True, exist_ok=True)
        for path in {*target.iterdir()} - {target / name for name in sent.files}:
            path.unlink()
        for name, content in sent.files.items():
            if isinstance(content, FileChanges):
                content.apply(target / name)
            else:
                (target / name).unlink(missing_ok=True)  # an engine may have mapped the file
                content.tofile(target / name)
