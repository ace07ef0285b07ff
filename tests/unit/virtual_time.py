"""Programs that wait, in no time."""

import asyncio
from collections.abc import Coroutine
from typing import Any


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its time passes only where everybody sleeps, and then at once: nothing depends on the machine."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        planned = [handle.when() for handle in self._scheduled if not handle.cancelled()]
        if not self._ready and planned:
            self.now = max(self.now, min(planned))
        super()._run_once()


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """As asyncio.run, in virtual time. Without threads and processes: those take real time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)
