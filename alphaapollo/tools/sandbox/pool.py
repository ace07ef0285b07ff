"""The sandbox as its users see it: started once, probed, then snippets go in and results come out."""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import os
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import TracebackType
from typing import Self, Unpack

from alphaapollo.tools.sandbox import launch
from alphaapollo.tools.sandbox.order import Options, Order
from alphaapollo.tools.sandbox.result import SandboxError, SandboxResult, SandboxUnavailableError, Status
from alphaapollo.tools.sandbox.supervisor import Layers, Supervisor

logger = logging.getLogger(__name__)

UNSAFE_VARIABLE = "ALPHAAPOLLO_UNSAFE_SANDBOX"  # "1": run code even where no seccomp filter holds it
OPTIONAL_LAYERS = ("bubblewrap", "landlock", "seccomp")

_WITHOUT = {
    "bubblewrap": "snippets see the names, sizes and owners of files (not what is in them), and may fill the disk with "
    "many small ones",
    "landlock": "snippets can open no file at all, so they import only what is loaded already",
    "seccomp": "snippets can start processes, use the network and signal other processes",
}

# Tries what a snippet must not do, and prints what it could.
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
    """Runs Python snippets in processes that can neither hurt nor read what is outside. Safe to use from any thread and
    any event loop.

    Args:
        without: layers not to use (bubblewrap, landlock, seccomp), to see what their absence means.
        allow_unsafe: run even where seccomp is missing; without it such a machine is refused.
        max_concurrent: snippets at work at a time; default: twice the processors.
    """

    def __init__(self, without: Iterable[str] = (), allow_unsafe: bool = False, max_concurrent: int | None = None):
        self._without = frozenset(without)
        if unknown := self._without - set(OPTIONAL_LAYERS):
            raise ValueError(f"without={sorted(unknown)}: the layers that can be left out are {OPTIONAL_LAYERS}.")
        self._allow_unsafe = allow_unsafe
        self._max_concurrent = max_concurrent or 2 * (os.cpu_count() or 1)
        self._supervisor: Supervisor | None = None
        self._layers: Layers | None = None
        self._lock = threading.Lock()
        self.missing: dict[str, str] = {}  # layer -> why it is not used

    def start(self) -> Self:
        """Start it if it does not run, the first time by probing which layers work here.

        SandboxUnavailableError: this machine cannot hold a snippet. SandboxError: it does not start.
        """
        with self._lock:
            if self._supervisor is None or self._supervisor.death:
                self._supervisor = self._restart() if self._layers else self._probe()
        return self

    @property
    def mode(self) -> str:
        """The layers at work, e.g. "prefork+rlimits+landlock+seccomp+bubblewrap"."""
        self.start()
        assert self._layers is not None
        return self._layers.mode

    def run(self, code: str, **options: Unpack[Options]) -> SandboxResult:
        """Run one snippet; see `run_python`."""
        order = Order(code, **options)
        try:
            return self._submit(order).result()
        except SandboxError:
            if order.session:
                raise
        return self._submit(order).result()  # what the sandbox itself could not do is tried once more

    async def run_async(self, code: str, **options: Unpack[Options]) -> SandboxResult:
        """Run one snippet without blocking the event loop; see `run_python`."""
        order = Order(code, **options)
        try:
            return await self._result(order)
        except SandboxError:
            if order.session:
                raise
        return await self._result(order)

    async def _result(self, order: Order) -> SandboxResult:
        running = self._supervisor is not None and not self._supervisor.death
        future = self._submit(order) if running else await asyncio.to_thread(self._submit, order)
        return await asyncio.wrap_future(future)

    def end_session(self, session: str) -> None:
        """Forget its variables."""
        if self._supervisor is not None:
            self._supervisor.end_session(session)

    def close(self) -> None:
        """Kill everything it has started."""
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

    def _submit(self, order: Order) -> Future[SandboxResult]:
        self.start()
        assert self._supervisor is not None and self._layers is not None
        if reason := order.too_long:
            refused: Future[SandboxResult] = Future()
            refused.set_result(SandboxResult(Status.REFUSED, "", reason, 0.0, self._layers.mode, reason))
            return refused
        return self._supervisor.submit(order)

    def _restart(self) -> Supervisor:
        assert self._layers is not None
        supervisor = Supervisor(self._layers.bubblewrap, self._max_concurrent)
        supervisor.layers = self._layers
        return supervisor

    def _probe(self) -> Supervisor:
        """The first interpreter, with the strongest layers that work."""
        self.missing = dict.fromkeys(sorted(self._without), "it is switched off")
        reason = self.missing.get("bubblewrap") or launch.bubblewrap_missing()
        for bubblewrap in (False,) if reason else (True, False):
            try:
                supervisor = Supervisor(bubblewrap, self._max_concurrent)
            except SandboxError as error:
                if not bubblewrap:
                    raise
                reason = str(error)
                continue
            for layers in self._candidates(supervisor):
                supervisor.layers = layers
                if holds(supervisor, layers):
                    self._accept(layers, supervisor.interpreter.facts, reason)
                    return supervisor
            supervisor.close()
            reason = reason or "probes of what is forbidden succeed in it"
        raise SandboxUnavailableError(
            "the sandbox cannot hold Python code here: no seccomp filter works "
            f"({self.missing.get('seccomp', 'it needs Linux on x86_64 or aarch64')}). "
            f"Run on a machine that has it, or, if you trust the code, allow it: {UNSAFE_VARIABLE}=1."
        )

    def _candidates(self, supervisor: Supervisor) -> list[Layers]:
        """From the strongest to the weakest that the user accepts."""
        facts = supervisor.interpreter.facts
        seccomp = [True] if facts["seccomp"] and "seccomp" not in self._without else []
        landlock = [True] if facts["landlock"] and "landlock" not in self._without else []
        unsafe = [False] if self._allow_unsafe else []
        setuid = [True, False] if facts["root"] else [False]
        choices = product([*seccomp, *unsafe], [*landlock, False], setuid)
        base = supervisor.layers
        return [replace(base, seccomp=first, landlock=second, setuid=third) for first, second, third in choices]

    def _accept(self, layers: Layers, facts: dict[str, bool], without_bubblewrap: str) -> None:
        self._layers = layers
        reasons = {"bubblewrap": without_bubblewrap}
        for name in OPTIONAL_LAYERS:
            if not getattr(layers, name):
                default = (
                    "probes of what is forbidden succeed in spite of it" if facts.get(name) else "the kernel has none"
                )
                self.missing.setdefault(name, reasons.get(name) or default)
                logger.warning("sandbox without %s (%s): %s.", name, self.missing[name], _WITHOUT[name])


def holds(supervisor: Supervisor, layers: Layers) -> bool:
    """Whether what these layers forbid is in fact impossible, and what they allow possible."""
    readable = str(Path(__file__).resolve().parents[1] / "__init__.py")
    order = Order(_PROBE % readable)
    try:
        result = supervisor.submit(order).result()
    except SandboxError:
        return False
    if result.status is not Status.OK:
        return False
    can = json.loads(result.stdout)
    files = not layers.landlock or (not can["read"] and not can["list"] and can["write"])
    no_files = layers.landlock or not layers.seccomp or not (can["read"] or can["list"] or can["write"])
    return files and no_files and (not layers.seccomp or not (can["socket"] or can["fork"]))


_default: dict[int, Sandbox] = {}  # by process: a forked one cannot use its parent's
_default_lock = threading.Lock()


def default_sandbox() -> Sandbox:
    """The one that `run_python` and the tools of this process share."""
    with _default_lock:
        if os.getpid() not in _default:
            _default[os.getpid()] = Sandbox(allow_unsafe=os.environ.get(UNSAFE_VARIABLE) == "1")
            atexit.register(_default[os.getpid()].close)
        return _default[os.getpid()]
