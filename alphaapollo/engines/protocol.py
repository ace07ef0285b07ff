"""Interface of an inference engine: tokens in, tokens out.

vllm/engine.py is the production engine, hf.py a slow reference implementation, fake.py an engine without a model for
tests.
"""

from __future__ import annotations

from alphaapollo.types import Completion, Sampling, WeightReceipt


class EngineError(RuntimeError):
    """The engine died or does not answer and cannot be used any more."""


class EngineDied(EngineError):
    """The engine's core process died. A replacement engine can be started."""


class Engine:
    """One engine replica. All calls are awaited on one event loop; generate and log_probs calls may overlap.

    The methods with a default suit engines without separate processes and without a cache between requests.
    """

    has_weights: bool
    """False for engines without weights that must be verified after a publish."""

    async def prepare(self) -> None:
        """Run the part of the start that needs no GPU (imports). `start` calls it if necessary."""

    async def start(self) -> None:
        """Load the model. Raises ValueError for a model that cannot be served, EngineError for a failed start."""

    async def generate(self, token_ids: list[int], sampling: Sampling, request_id: str) -> Completion:
        """Sample one completion of 1 to `sampling.max_tokens` tokens.

        Log-probs are those of the sampled tokens under softmax(logits / temperature), before top-p and top-k
        (temperature 0: under softmax(logits)).
        """
        raise NotImplementedError

    async def log_probs(self, token_ids: list[int]) -> list[float]:
        """Return the log-prob of each token after the first at temperature 1 (one fewer than `token_ids`)."""
        raise NotImplementedError

    async def pause(self) -> None:
        """Pause between two tokens. Idempotent.

        Running requests keep their tokens and continue after `resume` with the weights received by then; new requests
        wait. The KV cache of running requests is recomputed.
        """
        raise NotImplementedError

    async def resume(self) -> None:
        """Continue after `pause`."""
        raise NotImplementedError

    async def sleep(self) -> None:
        """Free the GPU memory of weights and cache. Afterwards, in this order: wake_weights, receive_weights,
        confirm_weights, wake_cache. Does nothing on a CPU or on GPUs that are not shared."""

    async def wake_weights(self) -> None:
        """Allocate the weights again; their values must be received. Does nothing if the engine did not sleep."""

    async def receive_weights(self, folder: str) -> None:
        """Load what the trainer wrote into shared memory. (vLLM's own transfers deliver the weights directly.)"""
        raise NotImplementedError

    async def confirm_weights(self, version: int) -> WeightReceipt:
        """Finish a weight update: drop caches of older weights and return the digest of what the engine computes with.
        Running requests must be paused."""
        raise NotImplementedError

    async def release_cache(self) -> None:
        """Free the memory of the KV cache until wake_cache; running requests are paused meanwhile."""

    async def wake_cache(self) -> None:
        """Allocate the KV cache again. Does nothing if it was not freed."""

    def pids(self) -> list[int]:
        """Process ids of the engine besides this process, the core first."""
        return []

    def progress(self) -> int:
        """Counter that changes while running requests make progress; 0 for engines in this process
        (utils/heartbeat.py)."""
        return 0

    async def close(self) -> None:
        """Stop the engine and its processes."""
