"""Many things at once, of which each may be told that it is over."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from alphaapollo.evolving.budget import Halt

T = TypeVar("T")


async def all_settled(jobs: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results, in order. Every job is waited for before anything is raised: a call that is in flight is paid for,
    and ends in the pool. An error of any goes before a Halt; cancelled, all are."""
    results = await asyncio.gather(*jobs, return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:
        raise next((error for error in errors if not isinstance(error, Halt)), errors[0])
    return [result for result in results if not isinstance(result, BaseException)]
