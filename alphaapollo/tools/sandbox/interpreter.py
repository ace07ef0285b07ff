"""A running pre-forked interpreter, seen from outside."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import tempfile

from alphaapollo.tools.sandbox import launch
from alphaapollo.tools.sandbox.child import MESSAGE_BYTES
from alphaapollo.tools.sandbox.result import SandboxError
from alphaapollo.tools.sandbox.zygote import remove_tree

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
START_TIMEOUT = 120.0  # seconds until it has imported everything


class Interpreter:
    """Starts one and waits until it can fork (SandboxError: it does not start).

    `socket` takes orders and gives notices; `facts` is what the machine offers to its children.
    """

    def __init__(self, bubblewrap: bool):
        self.folder = "" if bubblewrap else tempfile.mkdtemp(prefix="alphaapollo-sandbox-")
        if self.folder:
            os.chmod(self.folder, 0o711)  # the runs' own folders in it belong to whom they run as
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed in `end`
        self.process, self.socket = launch.start(self.folder, bubblewrap, self._log)
        self._zygote: int | None = None  # a bubblewrap that is killed leaves what is in it running
        try:
            self.facts = self._wait_until_ready()
        except SandboxError:
            self.end()
            raise

    def last_words(self) -> str:
        """The last line that it wrote to stderr."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f": {lines[-1][:300]}" if lines else ""

    def end(self) -> None:
        """Kill it, and with it its children."""
        with contextlib.suppress(ProcessLookupError):
            if self._zygote is not None:
                signal.pidfd_send_signal(self._zygote, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self._zygote is not None:
            os.close(self._zygote)
        self.socket.close()
        self._log.close()
        if self.folder:
            with contextlib.suppress(FileNotFoundError):  # it has removed it itself
                remove_tree(self.folder)

    def _wait_until_ready(self) -> dict[str, bool]:
        self.socket.settimeout(START_TIMEOUT)
        try:
            message, control, _, _ = self.socket.recvmsg(MESSAGE_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
        except (TimeoutError, ConnectionResetError):
            message = b""
        if not message:
            raise SandboxError(f"the pre-forked interpreter does not start{self.last_words()}")
        self.socket.settimeout(None)
        (pid, _, _) = _CREDENTIALS.unpack(control[0][2])
        self._zygote = os.pidfd_open(pid)
        facts: dict[str, bool] = json.loads(message)
        return facts
