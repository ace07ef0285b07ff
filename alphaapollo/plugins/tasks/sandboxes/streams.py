"""The output of a command, archives of files, and frames of a sandbox. Imports only the standard library (init.py)."""

from __future__ import annotations

import io
import json
import struct
import tarfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

LENGTH = struct.Struct("!I")  # of the JSON header of a frame


def make_frame(header: Mapping[str, Any], content: bytes) -> bytes:
    """Return a request or a reply: the length of the header, the header with the size of the content, the content."""
    head = json.dumps({**header, "size": len(content)}).encode()
    return LENGTH.pack(len(head)) + head + content


class OutputBuffer:
    """The beginning and the end of a stream. limit: bytes that are kept."""

    def __init__(self, limit: int):
        self._half, self._head, self._tail, self._omitted = max(1, limit // 2), bytearray(), bytearray(), 0

    def add(self, chunk: bytes) -> None:
        space = self._half - len(self._head)
        self._head += chunk[:space]
        self._tail += chunk[space:]
        extra = max(0, len(self._tail) - self._half)
        del self._tail[:extra]
        self._omitted += extra

    def get(self) -> bytes:
        note = f"\n... {self._omitted} bytes are not shown ...\n".encode() if self._omitted else b""
        return bytes(self._head) + note + bytes(self._tail)

    def get_text(self) -> str:
        return self.get().decode(errors="replace")


def list_folder(folder: Path) -> list[tuple[str, Path]]:
    """Return the relative names and the paths of all in a folder."""
    return [(str(path.relative_to(folder)), path) for path in sorted(folder.rglob("*"))]


def pack(sources: Iterable[tuple[str, Path | bytes]], max_mb: int, mode: int | None = None) -> bytes:
    """Return an archive of files, links and empty folders with their names. Raises ValueError above a size.

    All belong to root. mode: of all files; None: their own.
    """
    size = 0

    def prepare(member: tarfile.TarInfo) -> tarfile.TarInfo:
        nonlocal size
        size += member.size
        if size > max_mb << 20:
            raise ValueError(
                f"{member.name}: the files to copy have more than {max_mb} MB. Remove some, or increase "
                "environment.storage_mb and environment.memory_mb of the task."
            )
        member.mode = member.mode if mode is None or member.isdir() else mode
        member.uid = member.gid = 0
        member.uname = member.gname = "root"
        return member

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, source in sources:
            if isinstance(source, Path):
                archive.add(source, name, recursive=False, filter=prepare)
            else:
                member = tarfile.TarInfo(name)
                member.size, member.mode, member.mtime = len(source), 0o755, int(time.time())
                archive.addfile(prepare(member), io.BytesIO(source))
    return buffer.getvalue()
