"""An engine without a model: instant, deterministic, for tests of everything around it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from alphaapollo.types import Completion, Sampling, StopReason, WeightReceipt

Script = Callable[[list[int], Sampling], list[int]]
"""(context, sampling) -> the tokens to answer with, before the cut at max_tokens."""


class FakeEngine:
    """Answers with tokens that are a function of (context, seed) alone; each is given log-prob `logprob`.

    `script` says what to answer; the default draws `min_tokens` to `max_tokens` random tokens below `vocab_size` and
    ends them with the first stop token. `seconds` is how long an answer takes.
    """

    holds_weights = False

    def __init__(
        self,
        vocab_size: int,
        min_tokens: int = 1,
        max_tokens: int = 16,
        script: Script | None = None,
        logprob: float = -1.0,
        seconds: float = 0.0,
    ):
        self._vocab_size = vocab_size
        self._lengths = (min_tokens, max_tokens)
        self._script = script or self._draw
        self._logprob = logprob
        self._seconds = seconds
        self._version = 0

    async def prepare(self) -> None:
        pass

    async def start(self) -> None:
        pass

    async def generate(self, token_ids: list[int], sampling: Sampling, request_id: str) -> Completion:
        if self._seconds:
            await asyncio.sleep(self._seconds)
        answer = self._script(token_ids, sampling)
        kept = answer[: sampling.max_tokens]
        stopped = len(kept) < sampling.max_tokens or kept[-1] in sampling.stop_token_ids
        return Completion(
            token_ids=kept,
            logprobs=[self._logprob] * len(kept),
            stop_reason=StopReason.STOP if stopped else StopReason.LENGTH,
            weight_version=self._version,
        )

    async def log_probs(self, token_ids: list[int]) -> list[float]:
        return [self._logprob] * (len(token_ids) - 1)

    async def receive_weights(self, folder: str) -> None:
        pass

    async def confirm_weights(self, version: int) -> WeightReceipt:
        self._version = version
        return WeightReceipt(version, digest="")

    async def sleep(self) -> None:
        pass

    async def wake_weights(self) -> None:
        pass

    async def release_cache(self) -> None:
        pass

    async def wake_cache(self) -> None:
        pass

    def pids(self) -> list[int]:
        return []

    async def close(self) -> None:
        pass

    def _draw(self, token_ids: list[int], sampling: Sampling) -> list[int]:
        draws = random.Random(f"{sampling.seed}:{token_ids[-1]}:{len(token_ids)}")
        length = draws.randint(*self._lengths)
        ending = list(sampling.stop_token_ids[:1])
        return [draws.randrange(self._vocab_size) for _ in range(length - len(ending))] + ending
