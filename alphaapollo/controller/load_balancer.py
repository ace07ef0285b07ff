"""Who plays how much: each request goes to the least loaded engine, and waits in line where none has room."""

from __future__ import annotations

import asyncio
import heapq
from collections import deque


class EngineChoice:
    """Samples in flight on each engine. Giving a place costs the logarithm of the number of engines, however many
    wait; of equally loaded engines the first is taken.

    size: number of engines.
    room: samples that an engine takes at most; a request for more gets an idle engine.
    """

    def __init__(self, size: int, room: int):
        self._room = room
        self._load = [0] * size
        self._least = [(0, engine) for engine in range(size)]  # a heap; entries that are out of date are passed over
        self._waiting: deque[tuple[int, asyncio.Future[int]]] = deque()

    async def take(self, samples: int) -> int:
        """The engine to play so many samples on, once it has room for them; in the order of asking."""
        place: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append((samples, place))
        self._serve()
        try:
            return await place
        except asyncio.CancelledError:
            if not place.cancelled():  # it was given one that it does not live to use
                self.give_back(place.result(), samples)
            raise

    def give_back(self, engine: int, samples: int) -> None:
        """They have been played."""
        self._add(engine, -samples)
        self._serve()

    def _serve(self) -> None:
        while self._waiting:
            samples, place = self._waiting[0]
            if not place.done():
                engine = self._find()
                if self._load[engine] and self._load[engine] + samples > self._room:
                    return
                self._add(engine, samples)
                place.set_result(engine)
            self._waiting.popleft()

    def _find(self) -> int:
        while self._least[0][0] != self._load[self._least[0][1]]:
            heapq.heappop(self._least)
        return self._least[0][1]

    def _add(self, engine: int, samples: int) -> None:
        self._load[engine] += samples
        heapq.heappush(self._least, (self._load[engine], engine))
