"""Publishing weights, with proof that the engines hold what the trainer sent.

    policy.probe          log-probs of a few tokens
    engines.wake_weights  memory for the weights alone: the policy still holds the GPU
    policy.send_weights   into shared memory, or by vLLM's own transfer into the engines
    engines.receive       out of shared memory, where it went there
    engines.confirm       digests equal?
    policy.rest           it lets go of the GPU
    engines.wake_cache    which takes all that they may
    engines.log_probs     equal to the policy's?

Two proofs, for each misses what the other sees: a digest cannot tell that a layer computes with a stale packed copy
(tied embeddings on vLLM's CPU engine), a probe of a few tokens cannot see every parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from alphaapollo.types import WeightReceipt, WeightUpdate

GAP_FLOAT32 = 5e-5  # mean |difference| in nats: up to 1e-7 when right, 7e-4 to 9e-3 with one stale layer
GAP_BFLOAT16 = 0.1  # bfloat16 itself makes 0.02


class WeightSyncError(RuntimeError):
    """An engine does not hold the weights that the trainer sent."""


class Trainer(Protocol):
    """The side that sends: controller.handles.PolicyGroup."""

    async def send_weights(self, version: int) -> WeightUpdate: ...

    async def release_weights(self) -> None: ...

    async def probe(self, token_ids: list[int]) -> list[float]: ...

    async def rest(self) -> None: ...


class Engines(Protocol):
    """The side that receives: controller.handles.EngineGroup."""

    async def hold_weights(self) -> bool: ...

    async def wake_weights(self) -> None: ...

    async def receive_weights(self, folder: str) -> None: ...

    async def confirm_weights(self, version: int) -> list[WeightReceipt]: ...

    async def wake_cache(self) -> None: ...

    async def log_probs(self, token_ids: list[int]) -> list[list[float]]: ...


@dataclass
class WeightPublisher:
    """Keeps the engines on the trainer's weights; `tolerance` is the largest mean gap of the probe in nats."""

    policy: Trainer
    engines: Engines
    probe: list[int]  # a few token ids
    tolerance: float

    async def publish(self, version: int) -> dict[str, float]:
        """Publish, prove, and return the measured gap; the policy's turn on the GPUs ends, that of the engines begins.
        Raises WeightSyncError on any difference. A fake engine has no weights, so there is nothing to do."""
        if not await self.engines.hold_weights():
            await self.policy.rest()
            return {}
        expected = np.array(await self.policy.probe(self.probe))
        await self.engines.wake_weights()
        update = await self.policy.send_weights(version)
        if update.path:
            await self.engines.receive_weights(update.path)
        for engine, receipt in enumerate(await self.engines.confirm_weights(version)):
            if (receipt.version, receipt.digest) != (update.version, update.digest):
                raise WeightSyncError(
                    f"engine {engine} holds version {receipt.version} with digest {receipt.digest} after publishing "
                    f"version {update.version} with digest {update.digest}: its parameters are not the trainer's."
                )
        await self.policy.release_weights()
        await self.policy.rest()
        await self.engines.wake_cache()
        return {"sync/probe_gap": await self._probe_gap(expected)}

    async def _probe_gap(self, expected: np.ndarray) -> float:
        gaps = [float(np.abs(np.array(held) - expected).mean()) for held in await self.engines.log_probs(self.probe)]
        worst = max(gaps)
        if not worst <= self.tolerance:  # also catches nan
            raise WeightSyncError(
                f"after publishing, the log-probs of engine {gaps.index(worst)} differ from the trainer's by "
                f"{worst:.2e} nats on average over {len(self.probe) - 1} probe tokens (allowed: {self.tolerance:.0e}): "
                "it holds the weights but does not compute with them."
            )
        return worst
