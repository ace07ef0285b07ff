"""What the rollout needs of an inference engine: tokens in, tokens out.

vllm/engine.py is the real one, hf_engine.py its slow twin for comparison, fake_engine.py the twin that makes the
loop testable in seconds.
"""

from __future__ import annotations

from typing import Protocol

from alphaapollo.types import Completion, Sampling, WeightReceipt


class EngineError(RuntimeError):
    """An engine died or does not answer; the run cannot go on with it."""


class EngineDied(EngineError):
    """Its core process is gone. Another one in its place would do."""


class InThisProcess:
    """What an engine has nothing to do for that has no processes of its own and keeps no cache between requests; of
    `Engine`, by default."""

    async def prepare(self) -> None:
        pass

    async def start(self) -> None:
        pass

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

    def progress(self) -> int:
        return 0

    async def close(self) -> None:
        pass


class Engine(Protocol):
    """One engine replica. All calls are awaited on one event loop; generate and log_probs may overlap each other."""

    holds_weights: bool
    """False for the fake engine: it has no model, so there is nothing to prove after a publish."""

    async def prepare(self) -> None:
        """What of a start touches no GPU (imports); `start` does it where it has not been done."""
        ...

    async def start(self) -> None:
        """Load the model. Raises ValueError for a model that cannot be served, EngineError for a failed start."""
        ...

    async def generate(self, token_ids: list[int], sampling: Sampling, request_id: str) -> Completion:
        """Sample one completion of 1 to `sampling.max_tokens` tokens. Log-probs are those of the sampled tokens under
        softmax(logits / temperature), before top-p and top-k (temperature 0: under softmax(logits))."""
        ...

    async def log_probs(self, token_ids: list[int]) -> list[float]:
        """Log-prob of each token after the first at temperature 1 (one fewer than `token_ids`)."""
        ...

    async def pause(self, keep_cache: bool = False) -> None:
        """Stop between two tokens. What runs keeps its tokens and, after `resume`, goes on under the weights that have
        come by then; what is asked meanwhile waits. keep_cache: what was computed of their contexts stays, else it is
        computed anew. Twice does no harm."""
        ...

    async def resume(self) -> None:
        """Go on after `pause`."""
        ...

    async def sleep(self) -> None:
        """Give up the GPU's memory, weights and cache. Then, in this order: wake_weights, receive_weights,
        confirm_weights, wake_cache. On a CPU, and on GPUs of its own, the engine stays as it is."""
        ...

    async def wake_weights(self) -> None:
        """Take the memory of the weights again; they have to come anew. Nothing where it did not sleep."""
        ...

    async def receive_weights(self, folder: str) -> None:
        """Take what the trainer wrote into shared memory. (vLLM's own transfers bring the weights themselves.)"""
        ...

    async def confirm_weights(self, version: int) -> WeightReceipt:
        """Everything has come: forget what is cached under older weights, and say what is held: the digest is computed
        from what the engine computes with. No request may be running that is not paused."""
        ...

    async def release_cache(self) -> None:
        """Give up the memory of the cache alone, until wake_cache; what runs is paused so long."""
        ...

    async def wake_cache(self) -> None:
        """Take the memory of the cache again: ready to generate. Nothing where it was not given up."""
        ...

    def pids(self) -> list[int]:
        """Its processes besides this one, the core first."""
        ...

    def progress(self) -> int:
        """Changes while something of what runs gets on; an engine in this process counts that itself (pulse.py)."""
        ...

    async def close(self) -> None:
        """End the engine and its processes."""
        ...
