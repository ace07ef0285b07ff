"""Interface of an inference engine: token ids in, token ids out.

Implementations: vllm/engine.py for production, hf.py as a slow reference, fake.py without a model for tests.
"""

from __future__ import annotations

from alphaapollo.types import Completion, Sampling, WeightReceipt


class EngineError(RuntimeError):
    """Error: the engine died or does not respond, and cannot be used any more."""


class EngineDied(EngineError):
    """Error: the engine's core process died. A replacement engine can be started."""


class Engine:
    """Interface of one engine replica. Call it from one event loop; calls of generate and log_probs may overlap.

    The default implementations are for engines without separate processes and without a cache between requests.
    """

    has_weights: bool
    """Whether the engine has weights that are verified after a weight sync."""

    async def prepare(self) -> None:
        """Do the part of the start that needs no GPU, such as imports. `start` calls it if necessary."""

    async def start(self) -> None:
        """Load the model. Raises ValueError if the model cannot be served, EngineError if the start fails."""

    async def generate(self, token_ids: list[int], sampling: Sampling, request_id: str) -> Completion:
        """Sample one completion of 1 to `sampling.max_tokens` tokens.

        The log-probs of the sampled tokens are computed from softmax(logits / temperature), before top-p and top-k. At
        temperature 0 they are computed from softmax(logits).
        """
        raise NotImplementedError

    async def log_probs(self, token_ids: list[int]) -> list[float]:
        """Return the log-probs at temperature 1 of `token_ids[1:]`, each given the tokens before it."""
        raise NotImplementedError

    async def pause(self) -> None:
        """Pause generation between two tokens. Idempotent.

        Running requests keep their tokens and continue after `resume` with the latest weights and a recomputed KV
        cache. New requests wait for `resume`.
        """
        raise NotImplementedError

    async def resume(self) -> None:
        """Continue generation after `pause`."""
        raise NotImplementedError

    async def sleep(self) -> None:
        """Free the GPU memory of weights and KV cache. To continue, call wake_weights, receive_weights, confirm_weights
        and wake_cache in this order. Does nothing on a CPU or on GPUs that are not shared with the trainer."""

    async def wake_weights(self) -> None:
        """Allocate memory for the weights after `sleep`, else do nothing. Call receive_weights next to load values."""

    async def receive_weights(self, folder: str) -> None:
        """Load the weights that the trainer wrote into shared memory. vLLM's own transfers do not use this method."""
        raise NotImplementedError

    async def confirm_weights(self, version: int) -> WeightReceipt:
        """Finish a weight update: clear caches of old weights and return the digest of the weights in use. Running
        requests must be paused."""
        raise NotImplementedError

    async def release_cache(self) -> None:
        """Free the memory of the KV cache. Running requests are paused until wake_cache."""

    async def wake_cache(self) -> None:
        """Allocate the KV cache if it was freed, else do nothing."""

    def pids(self) -> list[int]:
        """Return the process ids of the engine except this process, the core first."""
        return []

    def progress(self) -> int:
        """Return a counter that changes while running requests make progress (utils/heartbeat.py). It is 0 for engines
        in this process."""
        return 0

    async def close(self) -> None:
        """Stop the engine and its processes."""
