"""Profile single iterations (trainer.profile_steps): one Chrome trace with the driver, training ranks and engines.

start_step(3) -> all processes record spans -> iteration 3 -> start_step(4) writes profiles/step_000003.json.gz
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from alphaapollo.controller.worker_groups import WorkerGroups
from alphaapollo.observability.chrome_trace import write_trace
from alphaapollo.observability.console import Console
from alphaapollo.observability.spans import SPANS
from alphaapollo.observability.timing import Timer


class StepProfiler:
    """Profiler of the iterations in `steps`. The profile of an iteration also covers saving its checkpoint."""

    def __init__(self, steps: Sequence[int], workers: WorkerGroups, folder: Path, console: Console):
        self._steps, self._workers, self._folder, self._console = set(steps), workers, folder, console
        self._active: int | None = None

    async def start_step(self, step: int | None, timer: Timer) -> None:
        """Write the profile of the previous iteration, and start recording if iteration `step` is to be profiled.

        step: next iteration; None after the last one. timer: adds the time of this call to `timing/profile`.
        """
        ended, self._active = self._active, step if step in self._steps else None
        if ended is None and self._active is None:
            return
        workers = self._workers
        roles = [role for role in (workers.policy, workers.critic, workers.engines) if role]
        with timer("profile"):
            if ended is not None:
                spans = SPANS.take_spans()
                for worker_spans in await asyncio.gather(*(role.stop_profile() for role in roles)):
                    spans += worker_spans
                path = self._folder / "profiles" / f"step_{ended:06d}.json.gz"
                await asyncio.to_thread(write_trace, path, spans)
                self._console.notify(f"profile of iteration {ended} written to {path} (open it at ui.perfetto.dev)")
            if self._active is not None:
                SPANS.start()
                await asyncio.gather(*(role.start_profile() for role in roles))
