"""The sandbox for its users: starts with the strongest layers that work on this machine and runs snippets."""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import os
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from itertools import compress, product
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from alphaapollo.tools.sandbox.supervisor import Supervisor
from alphaapollo.tools.sandbox.types import (
    MAX_CODE_BYTES,
    SandboxError,
    SandboxRequest,
    SandboxResult,
    SandboxUnavailableError,
    Status,
    format_mode,
)

logger = logging.getLogger(__name__)

UNSAFE_VARIABLE = "ALPHAAPOLLO_UNSAFE_SANDBOX"  # "1": run code even without a seccomp filter
OPTIONAL_LAYERS = {  # what snippets can do without each of them
    "bubblewrap": "snippets see the names, sizes and owners of files (not their contents), and can fill the disk with "
    "many small files",
    "landlock": "snippets cannot open any file, so they import only what is loaded already",
    "seccomp": "snippets can start processes, use the network and signal other processes",
}

# Attempts forbidden operations and prints which succeed.
_PROBE = """
import json, os, socket
def can(action):
    try:
        action()
    except OSError:
        return False
    return True
def fork():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
print(json.dumps({
    "read": can(lambda: open(%r).close()),
    "list": can(lambda: os.listdir("/")),
    "socket": can(lambda: socket.socket().close()),
    "fork": can(fork),
    "write": can(lambda: open("probe", "w").close()),
}))
"""


class Sandbox:
    """Runs Python snippets in isolated processes. Safe to use from any thread and any event loop.

    Args:
        without: layers not to use (bubblewrap, landlock, seccomp), to see the effect of each.
        allow_unsafe: run even where seccomp does not work; otherwise such a machine is refused.
        max_concurrent: snippets that run at a time; default: twice the number of CPUs.
    """

    def __init__(self, without: Iterable[str] = (), allow_unsafe: bool = False, max_concurrent: int | None = None):
        self._without = frozenset(without)
        if unknown := self._without - OPTIONAL_LAYERS.keys():
            raise ValueError(f"without={sorted(unknown)} must be layers of {', '.join(OPTIONAL_LAYERS)}.")
        self._allow_unsafe = allow_unsafe
        self._max_concurrent = max_concurrent or 2 * (os.cpu_count() or 1)
        self._supervisor: Supervisor | None = None
        self._layers: frozenset[str] | None = None  # None: not probed yet
        self._lock = threading.Lock()
        self.missing: dict[str, str] = {}  # layer -> why it is not used

    def start(self) -> Self:
        """Start if not running. The first start finds out which layers work.

        Raises SandboxUnavailableError if this machine cannot isolate snippets, SandboxError if starting fails.
        """
        with self._lock:
            if self._supervisor is None or self._supervisor.failure:
                self._supervisor = self._probe() if self._layers is None else self._restart(self._layers)
        return self

    @property
    def mode(self) -> str:
        """The layers in use, e.g. "prefork+rlimits+landlock+seccomp+bubblewrap"."""
        self.start()
        assert self._layers is not None
        return format_mode(self._layers)

    def run(self, code: str, **options: Any) -> SandboxResult:
        """Run one snippet. `options`: fields of SandboxRequest."""
        request = SandboxRequest(code, **options)
        future = self._submit(request)
        if isinstance(future.exception(), SandboxError) and not request.session:
            future = self._submit(request)  # a failure of the sandbox is retried once
        return future.result()

    async def run_async(self, code: str, **options: Any) -> SandboxResult:
        """`run` without blocking the event loop."""
        request = SandboxRequest(code, **options)
        try:
            return await self._result(request)
        except SandboxError:
            if request.session:
                raise
        return await self._result(request)

    async def _result(self, request: SandboxRequest) -> SandboxResult:
        is_running = self._supervisor is not None and not self._supervisor.failure
        future = self._submit(request) if is_running else await asyncio.to_thread(self._submit, request)
        return await asyncio.wrap_future(future)

    def end_session(self, session: str) -> None:
        """Discard the session's variables."""
        if self._supervisor is not None:
            self._supervisor.end_session(session)

    def close(self) -> None:
        """Kill all processes of the sandbox."""
        with self._lock:
            if self._supervisor is not None:
                self._supervisor.close()
                self._supervisor = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _submit(self, request: SandboxRequest) -> Future[SandboxResult]:
        mode = self.mode
        size = len(request.code.encode("utf-8", "surrogatepass"))
        if size > MAX_CODE_BYTES:
            reason = f"{size} bytes of code, the limit is {MAX_CODE_BYTES}"
            refused: Future[SandboxResult] = Future()
            refused.set_result(SandboxResult(Status.REFUSED, "", reason, 0.0, mode, reason))
            return refused
        assert self._supervisor is not None
        return self._supervisor.submit(request)

    def _restart(self, layers: frozenset[str]) -> Supervisor:
        supervisor = Supervisor("bubblewrap" in layers, self._max_concurrent)
        supervisor.layers = layers
        return supervisor

    def _probe(self) -> Supervisor:
        """Start with the strongest layers that work; `missing` has the reasons for the others."""
        self.missing = dict.fromkeys(sorted(self._without), "it is switched off")
        if not shutil.which("bwrap"):
            self.missing.setdefault("bubblewrap", "it is not installed (package bubblewrap)")
        for bubblewrap in [("bubblewrap",), ()] if "bubblewrap" not in self.missing else [()]:
            try:
                supervisor = Supervisor(bool(bubblewrap), self._max_concurrent)
            except SandboxError as error:
                if not bubblewrap:
                    raise
                self.missing["bubblewrap"] = str(error)
                continue
            for layers in self._candidates(supervisor.zygote.facts):
                supervisor.layers = self._layers = layers.union(bubblewrap)
                if _is_isolated(supervisor):
                    self._note_missing(supervisor.zygote.facts)
                    return supervisor
            supervisor.close()
            self._layers = None
            self.missing.setdefault("bubblewrap", "forbidden operations succeed inside it")
        raise SandboxUnavailableError(
            "the sandbox cannot isolate Python code on this machine: no seccomp filter works "
            f"({self.missing.get('seccomp', 'it needs Linux on x86_64 or aarch64')}). "
            f"Use a machine that has seccomp, or set {UNSAFE_VARIABLE}=1 if you trust the code."
        )

    def _candidates(self, facts: Mapping[str, bool]) -> Iterator[frozenset[str]]:
        """Sets of layers to try, from the strongest to the weakest that the user accepts."""
        usable = [name for name in ("seccomp", "landlock", "setuid") if facts[name] and name not in self._without]
        for choice in product((True, False), repeat=len(usable)):
            layers = frozenset(["rlimits", *compress(usable, choice)])
            if "seccomp" in layers or self._allow_unsafe:
                yield layers

    def _note_missing(self, facts: Mapping[str, bool]) -> None:
        assert self._layers is not None
        for name in [name for name in OPTIONAL_LAYERS if name not in self._layers]:
            reason = "forbidden operations succeed in spite of it" if facts.get(name) else "the kernel does not have it"
            self.missing.setdefault(name, reason)
            logger.warning("sandbox without %s (%s): %s.", name, self.missing[name], OPTIONAL_LAYERS[name])


def _is_isolated(supervisor: Supervisor) -> bool:
    """Whether everything that the layers forbid fails, and what they allow works."""
    layers = supervisor.layers
    readable = str(Path(__file__).resolve().parents[1] / "__init__.py")
    try:
        result = supervisor.submit(SandboxRequest(_PROBE % readable)).result()
    except SandboxError:
        return False
    if result.status is not Status.OK:
        return False
    can = json.loads(result.stdout)
    if "seccomp" in layers and (can["socket"] or can["fork"]):
        return False
    if "landlock" in layers:
        return can["write"] and not can["read"] and not can["list"]
    return "seccomp" not in layers or not (can["read"] or can["list"] or can["write"])


_default: dict[int, Sandbox] = {}  # by process, because a forked process cannot use its parent's
_default_lock = threading.Lock()


def default_sandbox() -> Sandbox:
    """The sandbox that `run_python` and the tools of this process share."""
    with _default_lock:
        if os.getpid() not in _default:
            _default[os.getpid()] = Sandbox(allow_unsafe=os.environ.get(UNSAFE_VARIABLE) == "1")
            atexit.register(_default[os.getpid()].close)
        return _default[os.getpid()]
