"""Who watches over a run while it trains: those without whom nothing goes on (process_watch.py), and whoever stands
still (stall_watch.py)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

from alphaapollo.config.schema import Training
from alphaapollo.config.schema.base import Device
from alphaapollo.controller.health.process_monitor import ProcessWatch
from alphaapollo.controller.health.stall_monitor import Patience, StallWatch
from alphaapollo.controller.ranks import Ranks
from alphaapollo.launch.resume import way_on


class Workers(Protocol):
    """Those of a run, of any kind."""

    @property
    def ranks(self) -> list[Ranks[Any]]: ...

    @property
    def needed(self) -> dict[str, int]:
        """Processes besides the workers without which nothing goes on: pid by name."""
        ...


@asynccontextmanager
async def watched(
    crew: Workers, trainer: Training, device: Device, notice: Callable[[str], None]
) -> AsyncIterator[Sequence[Callable[[], bool]]]:
    """Around what is to be watched: from the workers' start, which has a limit of its own, to the end. Gives who may
    have cancelled the block, as background_save.py asks for it. Raises WorkerDied and Stalled out of it."""
    folder = trainer.folder
    needed = ProcessWatch(crew.needed, lambda what: notice(f"{what}{way_on(folder)}"))
    stalls = StallWatch(
        crew.ranks,
        Patience(trainer.stall_notice, trainer.stall_timeout),
        device,
        folder,
        notice,
        lambda: f"stopped{way_on(folder)}",
        needed=crew.needed,
    )
    async with needed, stalls:
        yield [needed.gave_up, stalls.gave_up]
