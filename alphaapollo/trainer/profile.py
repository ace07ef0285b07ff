"""Profiles of single iterations (trainer.profile_steps): one trace of controller, training ranks and engines.

turn_to(step) -> every process begins to note -> the iteration -> turn_to(step + 1) -> profiles/step_000003.json.gz
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from alphaapollo.controller.crew import Crew
from alphaapollo.observability.chrome_trace import write_trace
from alphaapollo.observability.console import Console
from alphaapollo.observability.spans import SPANS
from alphaapollo.observability.timing import Timer


class StepProfiler:
    """Records the iterations that were asked for. An iteration's profile ends where the next one begins, so it has its
    checkpoint."""

    def __init__(self, steps: Sequence[int], crew: Crew, folder: Path, console: Console):
        self._steps, self._crew, self._folder, self._console = set(steps), crew, folder, console
        self._at: int | None = None

    async def turn_to(self, step: int | None, timer: Timer) -> None:
        """Iteration `step` begins; None: the last one has ended. `timer`: where what this takes is counted."""
        ended, self._at = self._at, step if step in self._steps else None
        if ended is not None:
            with timer("profile"):
                await self._end(ended)
        if self._at is not None:
            with timer("profile"):
                await self._begin()

    async def _begin(self) -> None:
        crew = self._crew
        SPANS.start()
        await asyncio.gather(*(role.start_profile() for role in (crew.policy, crew.critic, crew.engines) if role))

    async def _end(self, step: int) -> None:
        crew = self._crew
        roles = [role for role in (crew.policy, crew.critic, crew.engines) if role]
        spans = SPANS.take()
        for own in await asyncio.gather(*(role.take_profile() for role in roles)):
            spans += own
        path = self._folder / "profiles" / f"step_{step:06d}.json.gz"
        await asyncio.to_thread(write_trace, path, spans)
        self._console.notice(f"the profile of iteration {step} lies in {path} (open it at ui.perfetto.dev)")
