"""What the requests of one API key hold in the server, counted before it is made."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from alphaapollo.plugins.tinker.wire import RequestError

MAX_BYTES = 1 << 30  # of one key; what stays after a request may use half of it
MAX_SAMPLES = 4096  # of one key that run at a time
ENTRY = 1024  # bytes of a session, a sampler, or a call without its body
RETRIED = 429  # status of requests that the client sends again


class Budget:
    """Memory, running samples and models of one API key. Raises RequestError with the status 429 above a limit.

    Bytes are those of bodies that are read, of calls that wait, of running samples (an estimate) and of results.
    """

    def __init__(self, max_models: int):
        self.size = self.num_samples = 0
        self.models, self._max_models = set[str](), max_models
        self.parsing = asyncio.Lock()  # held while a call's arrays exist, so that those of one call exist at a time
        self.retrieved = dict[str, Callable[[str], None]]()
        """Removes each result that was retrieved. It is kept for a client that lost the answer, while there is room."""

    def add(self, size: int, stays: bool = True) -> None:
        """Count bytes. stays: after the request that brings them."""
        limit = MAX_BYTES // 2 if stays else MAX_BYTES
        if size > limit:
            raise RequestError(f"the request needs {size >> 20} MiB, of at most {limit >> 20}. Split it.", status=413)
        while self.size + size > limit and self.retrieved:
            request_id = next(iter(self.retrieved))
            self.retrieved[request_id](request_id)
        if self.size + size > limit:
            text = f"requests and results of this API key hold {self.size >> 20} MiB. Wait, and retrieve results."
            raise RequestError(text, status=RETRIED)
        self.size += size

    @contextmanager
    def hold(self) -> Iterator[Callable[[int], None]]:
        """Context manager that yields a function which counts bytes until the end of the block."""
        total = 0

        def add(size: int) -> None:
            nonlocal total
            self.add(size, stays=False)
            total += size

        try:
            yield add
        finally:
            self.size -= total

    def add_samples(self, count: int, size: int) -> None:
        """Count samples that run. size: estimate of their bytes."""
        if self.num_samples and self.num_samples + count > MAX_SAMPLES:
            raise RequestError(f"{self.num_samples} samples of this API key are running. Wait.", status=RETRIED)
        self.add(size)
        self.num_samples += count

    def remove_samples(self, count: int, size: int) -> None:
        self.num_samples, self.size = self.num_samples - count, self.size - size

    def add_model(self, model_id: str) -> None:
        if len(self.models) >= self._max_models:
            raise RequestError(
                f"this API key has {len(self.models)} models, which is the limit. Close other clients, or start the "
                "server with a larger --max-models.",
                status=RETRIED,
            )
        self.models.add(model_id)
