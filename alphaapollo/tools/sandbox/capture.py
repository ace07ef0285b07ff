"""Keeps the beginning and the end of an output, however long it is."""

from __future__ import annotations


class Capture:
    """At most `limit` bytes of what is fed, half from the beginning and half from the end.

    >>> capture = Capture(4)
    >>> capture.feed(b"abcdefgh")
    >>> capture.text()
    'ab\\n... [4 bytes cut] ...\\ngh'
    """

    def __init__(self, limit: int):
        self._head_limit = (limit + 1) // 2
        self._tail_limit = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0

    def feed(self, data: bytes) -> None:
        self.total += len(data)
        room = self._head_limit - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > 2 * self._tail_limit + 4096:
            self._trim()

    def text(self) -> str:
        self._trim()
        cut = self.total - len(self._head) - len(self._tail)
        note = f"\n... [{cut} bytes cut] ...\n".encode() if cut else b""
        return (bytes(self._head) + note + bytes(self._tail)).decode("utf-8", errors="replace")

    def _trim(self) -> None:
        del self._tail[: max(0, len(self._tail) - self._tail_limit)]
