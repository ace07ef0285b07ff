"""Generate groups of trajectories, with progress on the console."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from alphaapollo.controller.handles import EngineGroup
from alphaapollo.observability.console import Console
from alphaapollo.types import GroupRequest, TrajectoryGroup


async def generate_groups(
    engines: EngineGroup, requests: Sequence[GroupRequest], console: Console, phase: str
) -> list[TrajectoryGroup]:
    """Run all requests concurrently. Returns groups in the order of the requests."""
    groups: dict[int, TrajectoryGroup] = {}
    await generate_missing_groups(groups, engines, requests, console, phase)
    return [groups[index] for index in range(len(requests))]


async def generate_missing_groups(
    groups: dict[int, TrajectoryGroup],
    engines: EngineGroup,
    requests: Sequence[GroupRequest],
    console: Console,
    phase: str,
    ended: Callable[[TrajectoryGroup], None] | None = None,
) -> None:
    """Run the requests missing in `groups` (by index) and add each group when it ends. ended: called with each
    group."""
    missing = [index for index in range(len(requests)) if index not in groups]
    console.phase(phase, len(groups), len(requests))
    async for position, group in engines.generate([requests[index] for index in missing]):
        groups[missing[position]] = group
        console.phase(phase, len(groups), len(requests))
        if ended:
            ended(group)
