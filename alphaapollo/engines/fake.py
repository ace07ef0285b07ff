"""Engine without a model, for tests: deterministic and without latency."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from alphaapollo.engines.protocol import Engine
from alphaapollo.engines.types import EngineSpec
from alphaapollo.types import Completion, ImageInput, Sampling, StopReason

AnswerScript = Callable[[list[int], Sampling], list[int]]
"""(context, sampling) -> token ids of the answer, before truncation to max_tokens."""
LOGPROB = -1.0  # log-prob of every token


@dataclass(eq=False)
class FakeEngine(Engine):
    """Fake engine whose answers depend only on the context and the seed."""

    vocab_size: int  # token ids of random answers are below this number
    min_tokens: int = 1  # of a random answer, including the stop token at its end if the request has stop tokens
    max_tokens: int = 16  # of a random answer
    script: AnswerScript | None = None  # computes an answer; None: random answers

    def __post_init__(self) -> None:
        self._version = 0
        self._unpaused = asyncio.Event()
        self._unpaused.set()

    @classmethod
    def build(cls, spec: EngineSpec) -> FakeEngine:
        """Build the fake engine of a run, which samples token ids of the model."""
        config = Path(spec.model_path) / "config.json"
        if not config.is_file():
            raise ValueError(f"model.path={spec.model_path} has no config.json. Set it to a local model folder.")
        return cls(vocab_size=int(json.loads(config.read_text())["vocab_size"]))

    async def generate(
        self, token_ids: list[int], sampling: Sampling, request_id: str, images: Sequence[ImageInput] = ()
    ) -> Completion:
        await self._unpaused.wait()
        complete_answer = (self.script or self._make_random_answer)(token_ids, sampling)
        answer = complete_answer[: sampling.max_tokens]
        is_stopped = len(answer) < sampling.max_tokens or answer[-1] in sampling.stop_token_ids
        stop_reason = StopReason.STOP if is_stopped else StopReason.LENGTH
        return Completion(answer, [LOGPROB] * len(answer), stop_reason, self._version)

    async def hold_requests(self) -> None:
        self._unpaused.clear()

    async def continue_requests(self) -> None:
        self._unpaused.set()

    async def log_probs(self, token_ids: list[int], images: Sequence[ImageInput] = ()) -> list[float]:
        return [LOGPROB] * (len(token_ids) - 1)

    async def load_folder(self, folder: str) -> None:
        pass

    async def apply_weights(self, version: int) -> None:
        self._version = version

    def _make_random_answer(self, token_ids: list[int], sampling: Sampling) -> list[int]:
        rng = random.Random(f"{sampling.seed}:{token_ids[-1]}:{len(token_ids)}")
        length = rng.randint(self.min_tokens, self.max_tokens)
        ending = list(sampling.stop_token_ids[:1])
        return [rng.randrange(self.vocab_size) for _ in range(length - len(ending))] + ending
