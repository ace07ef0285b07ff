"""Rootless sandbox for Python snippets. docs/tools.md describes what snippets can and cannot do.

SnippetSandbox (this module) -> zygote: an interpreter that has imported numpy, scipy and sympy, inside bubblewrap
                     -> one forked child per snippet, isolated by resource limits, Landlock and seccomp
"""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import os
import shutil
import threading
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import compress, product
from pathlib import Path
from typing import Any, Self

from alphaapollo.tools.sandbox.processes import (
    MAX_CODE_BYTES,
    SandboxRequest,
    SnippetProcess,
    ZygoteProcess,
    format_sandbox_mode,
)
from alphaapollo.tools.sandbox.processes import SandboxError as SandboxError
from alphaapollo.tools.sandbox.processes import SandboxResult as SandboxResult
from alphaapollo.tools.sandbox.processes import SandboxStatus as SandboxStatus
from alphaapollo.tools.sandbox.processes import SandboxUnavailableError as SandboxUnavailableError
from alphaapollo.tools.sandbox.zygote import KILLED_SUSPENDED

logger = logging.getLogger(__name__)

UNSAFE_VARIABLE = "ALPHAAPOLLO_UNSAFE_SANDBOX"  # "1": run code even if seccomp is unavailable
OPTIONAL_LAYERS = {  # layer -> what snippets can do without it
    "bubblewrap": "snippets see the names, sizes and owners of files (not their contents), and can fill the disk with "
    "many small files",
    "landlock": "snippets cannot open any file, so they import only modules that are already loaded",
    "seccomp": "snippets can start processes, use the network and signal other processes",
}

# Snippet that attempts forbidden operations and prints which of them succeed.
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
}))"""


@dataclass
class _Session:
    """Session and its process, which runs one snippet at a time. A snippet without a session gets a new _Session."""

    process: SnippetProcess | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    ended: threading.Event = field(default_factory=threading.Event)


class SnippetSandbox:
    """Sandbox that runs Python snippets in isolated processes. Can be used from any thread and event loop.

    Args:
        without: layers to disable (bubblewrap, landlock, seccomp), to see the effect of each.
        allow_unsafe: whether to run code even if seccomp does not work; by default `start` raises an error.
        max_concurrent: number of snippets that run at a time; default: twice the number of CPUs.
    """

    def __init__(self, without: Iterable[str] = (), allow_unsafe: bool = False, max_concurrent: int | None = None):
        self._without = frozenset(without)
        if unknown := self._without - OPTIONAL_LAYERS.keys():
            raise ValueError(f"without={sorted(unknown)}: unknown sandbox layers. Known: {', '.join(OPTIONAL_LAYERS)}.")
        self._allow_unsafe = allow_unsafe
        max_concurrent = max_concurrent or 2 * (os.cpu_count() or 1)
        self._slots = threading.Semaphore(max_concurrent)
        self._threads = ThreadPoolExecutor(max_concurrent, "sandbox")  # run_async uses them
        self._sessions: dict[str, _Session] = {}
        self._zygote: ZygoteProcess | None = None
        self._layers: frozenset[str] | None = None  # None: not probed yet
        self._lock = threading.RLock()
        self.missing: dict[str, str] = {}  # layer -> reason why it is not used

    def start(self) -> Self:
        """Start the sandbox if it is not running. The first start tests which isolation layers work here. Raises
        SandboxUnavailableError if this machine cannot isolate snippets, SandboxError if starting fails."""
        with self._lock:
            if self._zygote is None or self._zygote.has_ended:
                self.close()
                if self._layers is None:
                    self._zygote = self._start_most_isolated_zygote()
                else:
                    self._zygote = ZygoteProcess("bubblewrap" in self._layers)
        return self

    @property
    def mode(self) -> str:
        """Layers in use, e.g. "prefork+rlimits+landlock+seccomp+bubblewrap"."""
        self.start()
        assert self._layers is not None
        return format_sandbox_mode(self._layers)

    def run(self, code: str, **options: Any) -> SandboxResult:
        """Run one snippet. `options`: fields of SandboxRequest."""
        return self._run_request(SandboxRequest(code, **options), threading.Event())

    async def run_async(self, code: str, **options: Any) -> SandboxResult:
        """Run one snippet without blocking the event loop. Cancelling the call kills the snippet."""
        request, cancelled = SandboxRequest(code, **options), threading.Event()
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, self._run_request, request, cancelled)
        finally:
            cancelled.set()

    def end_session(self, session: str) -> None:
        """End a session: kill its process, which discards its variables."""
        if state := self._sessions.pop(session, None):
            state.ended.set()
            with state.lock:
                if state.process:
                    state.process.close()

    def close(self) -> None:
        """Kill all processes of the sandbox. Running snippets raise SandboxError."""
        with self._lock:
            zygote, self._zygote = self._zygote, None
            if zygote is not None:
                zygote.end_and_describe_exit()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run_request(self, request: SandboxRequest, cancelled: threading.Event) -> SandboxResult:
        try:
            return self._run_request_once(request, cancelled)
        except SandboxError:  # retried once, unless the snippet may have used a session or a connection
            if request.session or request.connection or cancelled.is_set() or self._zygote is None:
                raise
        return self._run_request_once(request, cancelled)

    def _run_request_once(self, request: SandboxRequest, cancelled: threading.Event) -> SandboxResult:
        mode = self.mode
        size = len(request.code.encode("utf-8", "surrogatepass"))
        if size > MAX_CODE_BYTES:
            reason = f"{size} bytes of code, the limit is {MAX_CODE_BYTES}"
            return SandboxResult(SandboxStatus.REFUSED, "", reason, 0.0, mode, reason)
        session = self._sessions.setdefault(request.session, _Session()) if request.session else _Session()
        with session.lock, self._slots:
            restarted = False
            if session.process is not None and session.process.has_ended:
                session.process.close()
                session.process, restarted = None, True
            if session.process is None:
                assert self._zygote is not None and self._layers is not None
                session.process = SnippetProcess(self._zygote, self._layers, request)
            result = session.process.run(request, lambda: cancelled.is_set() or session.ended.is_set())
        if result.reason == KILLED_SUSPENDED:  # the process was killed before it received the code
            return replace(self._run_request_once(request, cancelled), restarted=True)
        return replace(result, restarted=restarted)

    def _start_most_isolated_zygote(self) -> ZygoteProcess:
        """Start the pre-forked interpreter with the strongest isolation layers that work on this machine."""
        self.missing = dict.fromkeys(sorted(self._without), "it is disabled")
        if not shutil.which("bwrap"):
            self.missing.setdefault("bubblewrap", "it is not installed (package bubblewrap)")
        choices = [True, False] if "bubblewrap" not in self.missing else [False]
        for uses_bubblewrap in choices:
            try:
                zygote = ZygoteProcess(uses_bubblewrap)
            except SandboxError as error:
                if not uses_bubblewrap:
                    raise
                self.missing["bubblewrap"] = str(error)
                continue
            names = ("seccomp", "landlock", "setuid")
            usable = [name for name in names if zygote.available[name] and name not in self._without]
            for selectors in product((True, False), repeat=len(usable)):  # from all layers to none
                layers = frozenset(["rlimits", *compress(usable, selectors)])
                is_allowed = "seccomp" in layers or self._allow_unsafe
                if is_allowed and _are_isolation_layers_effective(zygote, layers):
                    self._layers = (layers | {"bubblewrap"}) if uses_bubblewrap else layers
                    for name in [name for name in OPTIONAL_LAYERS if name not in self._layers]:
                        broken, unsupported = "it does not block forbidden operations", "the kernel does not support it"
                        reason = self.missing.setdefault(name, broken if zygote.available.get(name) else unsupported)
                        logger.warning("the sandbox runs without %s (%s): %s.", name, reason, OPTIONAL_LAYERS[name])
                    return zygote
            zygote.end_and_describe_exit()
            self.missing.setdefault("bubblewrap", "forbidden operations succeed in it")
        raise SandboxUnavailableError(
            "the sandbox cannot isolate Python code on this machine: no seccomp filter works "
            f"({self.missing.get('seccomp', 'it needs Linux on x86_64 or aarch64')}). "
            f"Use a machine that has seccomp, or set {UNSAFE_VARIABLE}=1 if you trust the code."
        )


def _are_isolation_layers_effective(zygote: ZygoteProcess, layers: Collection[str]) -> bool:
    """Return whether a test snippet cannot do what these isolation layers forbid, and can do what they allow."""
    readable = str(Path(__file__).resolve().parents[1] / "__init__.py")
    request = SandboxRequest(_PROBE % readable)
    try:
        result = SnippetProcess(zygote, layers, request).run(request, lambda: False)
    except SandboxError:
        return False
    if result.status is not SandboxStatus.OK:
        return False
    allowed = json.loads(result.stdout)
    if "seccomp" in layers and (allowed["socket"] or allowed["fork"]):
        return False
    if "landlock" in layers:
        return allowed["write"] and not allowed["read"] and not allowed["list"]
    uses_files = allowed["read"] or allowed["list"] or allowed["write"]
    return "seccomp" not in layers or not uses_files  # without Landlock, seccomp forbids all files


_default_sandboxes: dict[int, SnippetSandbox] = {}  # by pid: a forked process cannot use its parent's sandbox
_default_lock = threading.Lock()


def get_default_sandbox() -> SnippetSandbox:
    """Return the shared sandbox of this process, which `run_python` and the tools use."""
    with _default_lock:
        if os.getpid() not in _default_sandboxes:
            _default_sandboxes[os.getpid()] = SnippetSandbox(allow_unsafe=os.environ.get(UNSAFE_VARIABLE) == "1")
            atexit.register(_default_sandboxes[os.getpid()].close)
        return _default_sandboxes[os.getpid()]


def run_python(code: str, **options: object) -> SandboxResult:
    """Run a Python snippet in the shared sandbox of this process, which starts at the first use.

    The snippet can use numpy, scipy and sympy, but not the network, other processes, or files outside its own empty
    folder. `random` and `numpy.random` start from the same seed each time. The snippet can read its own code and stdin,
    so compare its output with hidden answers outside the sandbox.

    Args:
        code: source code of the snippet.
        **options: stdin="", timeout=10.0 (seconds), memory_mb=1024, max_output=65536 (bytes), echo=False (print the
            value of the last expression), session="" (name under which snippets share variables); see `SandboxRequest`.

    Raises SandboxError if the sandbox itself fails, SandboxUnavailableError if this machine cannot isolate code.

    >>> run_python("print(int(input()) + 1)", stdin="41").stdout
    '42\\n'
    """
    return get_default_sandbox().run(code, **options)


async def run_python_async(code: str, **options: object) -> SandboxResult:
    """Run a Python snippet like `run_python`, without blocking the event loop."""
    return await get_default_sandbox().run_async(code, **options)
