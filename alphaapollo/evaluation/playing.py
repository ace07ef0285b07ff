"""Requests on engines, with their progress on the console."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from alphaapollo.controller.handles import EngineGroup
from alphaapollo.observability.console import Console
from alphaapollo.types import GroupRequest, TrajectoryGroup


async def generate(
    engines: EngineGroup, requests: Sequence[GroupRequest], console: Console, phase: str
) -> list[TrajectoryGroup]:
    """All requests at once; the groups come back in the requests' order, whatever order they end in."""
    groups: dict[int, TrajectoryGroup] = {}
    await generate_missing(groups, engines, requests, console, phase)
    return [groups[index] for index in range(len(requests))]


async def generate_missing(
    groups: dict[int, TrajectoryGroup],
    engines: EngineGroup,
    requests: Sequence[GroupRequest],
    console: Console,
    phase: str,
    ended: Callable[[TrajectoryGroup], None] | None = None,
) -> None:
    """Those that `groups`, by the requests' index, lacks; it has them as they end, and `ended` is told."""
    missing = [index for index in range(len(requests)) if index not in groups]
    console.phase(phase, len(groups), len(requests))
    async for place, group in engines.generate([requests[index] for index in missing]):
        groups[missing[place]] = group
        console.phase(phase, len(groups), len(requests))
        if ended:
            ended(group)
