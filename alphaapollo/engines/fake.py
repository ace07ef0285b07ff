"""Engine without a model, for tests: deterministic, with zero or simulated latency."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass

from alphaapollo.engines.protocol import Engine
from alphaapollo.types import Completion, Sampling, StopReason, WeightReceipt

AnswerScript = Callable[[list[int], Sampling], list[int]]
"""(context, sampling) -> token ids of the answer, before truncation to max_tokens."""
LOGPROB = -1.0  # log-prob of every token


@dataclass(eq=False)
class FakeEngine(Engine):
    """Fake engine whose answers depend only on the context and the seed."""

    has_weights = False

    vocab_size: int  # token ids of random answers are below this number
    min_tokens: int = 1  # length of random answers; if the request has stop tokens, the first one ends the answer
    max_tokens: int = 16
    script: AnswerScript | None = None  # computes an answer; None: random answers
    seconds_per_token: float = 0.0  # simulated time per token, independent of other requests; none for the prefill
    max_concurrent_requests: int | None = None  # including paused requests; None: unlimited

    def __post_init__(self) -> None:
        self._slots = asyncio.Semaphore(self.max_concurrent_requests or sys.maxsize)
        self._version = 0
        self._gate: asyncio.Future[None] | None = None  # resolved by resume
        self._running: set[asyncio.Task[None]] = set()  # sleeps that a pause cancels

    async def generate(self, token_ids: list[int], sampling: Sampling, request_id: str) -> Completion:
        async with self._slots:
            answer = (self.script or self._make_random_answer)(token_ids, sampling)
            kept = answer[: sampling.max_tokens]
            earlier = await self._sleep_and_track_versions(len(kept))
        stopped = len(kept) < sampling.max_tokens or kept[-1] in sampling.stop_token_ids
        return Completion(
            token_ids=kept,
            logprobs=[LOGPROB] * len(kept),
            stop_reason=StopReason.STOP if stopped else StopReason.LENGTH,
            weight_version=self._version,
            earlier_version_token_counts=tuple(earlier),
        )

    async def _sleep_and_track_versions(self, num_tokens: int) -> list[tuple[int, int]]:
        """Sleep for the time of `num_tokens` tokens. Returns (weight version, number of tokens) for each earlier weight
        version, if the weights change meanwhile."""
        loop, sampled = asyncio.get_running_loop(), 0.0  # a float: a pause does not lose a partly sampled token
        earlier: list[tuple[int, int]] = []
        while True:
            await self._wait_while_paused()
            if not self.seconds_per_token:
                return []
            version, since = self._version, loop.time()
            nap = asyncio.ensure_future(asyncio.sleep((num_tokens - sampled) * self.seconds_per_token))
            self._running.add(nap)
            try:
                await asyncio.wait((nap,))
            finally:
                nap.cancel()
                self._running.discard(nap)
            if not nap.cancelled():
                return earlier
            sampled = min(num_tokens, sampled + (loop.time() - since) / self.seconds_per_token)
            await self._wait_while_paused()
            before = sum(count for _, count in earlier)
            if self._version != version and int(sampled) > before:
                earlier.append((version, int(sampled) - before))

    async def _wait_while_paused(self) -> None:
        while self._gate:
            await asyncio.shield(self._gate)

    async def pause(self) -> None:
        if self._gate is None:
            self._gate = asyncio.get_running_loop().create_future()
        for nap in self._running:
            nap.cancel()

    async def resume(self) -> None:
        gate, self._gate = self._gate, None
        if gate is not None:
            gate.set_result(None)

    async def log_probs(self, token_ids: list[int]) -> list[float]:
        return [LOGPROB] * (len(token_ids) - 1)

    async def receive_weights(self, folder: str) -> None:
        pass

    async def confirm_weights(self, version: int) -> WeightReceipt:
        self._version = version
        return WeightReceipt(version, digest="")

    def _make_random_answer(self, token_ids: list[int], sampling: Sampling) -> list[int]:
        rng = random.Random(f"{sampling.seed}:{token_ids[-1]}:{len(token_ids)}")
        length = rng.randint(self.min_tokens, self.max_tokens)
        ending = list(sampling.stop_token_ids[:1])
        return [rng.randrange(self.vocab_size) for _ in range(length - len(ending))] + ending
