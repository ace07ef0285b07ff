"""Publish weights to the engines and verify that the engines compute with them (verification.py).

policy.probe          log-probs of a few tokens; the policy then offloads, so that the engines find free GPU memory
engines.pause         in flight only: running requests stop between two tokens
engines.wake_weights  allocate weights only: the policy still holds GPU memory
policy.send_weights   into shared memory, or by vLLM's own transfer into the engines
engines.confirm       load from shared memory where that is the transport; compare digests
policy.release        free the transfer buffers and the GPU
engines.wake_cache    allocate the KV cache
engines.resume        in flight only
engines.log_probs     compare with the policy's probe; requests may already run, but nothing is trained on before
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean
from typing import Protocol

from alphaapollo.types import WeightReceipt, WeightUpdate
from alphaapollo.weight_sync.verification import check_probe, check_probe_finite, check_receipts


class Trainer(Protocol):
    """Sending side: controller.handles.PolicyGroup."""

    async def send_weights(self, version: int) -> WeightUpdate: ...

    async def release_weights(self) -> None: ...

    async def probe(self, token_ids: list[int]) -> list[float]: ...

    async def offload(self) -> None: ...


class Engines(Protocol):
    """Receiving side: controller.handles.EngineGroup."""

    async def hold_weights(self) -> bool: ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def wake_weights(self) -> None: ...

    async def confirm_weights(self, version: int, folder: str = "") -> list[WeightReceipt]: ...

    async def wake_cache(self) -> None: ...

    async def log_probs(self, token_ids: list[int]) -> list[list[float]]: ...


@dataclass
class WeightPublisher:
    """Publishes the trainer's weights to the engines. `tolerance`: largest accepted mean probe mismatch, in nats."""

    policy: Trainer
    engines: Engines
    probe: list[int]  # token ids
    tolerance: float
    in_flight: bool = False  # requests may be running; they are paused
    _before: list[float] = field(default_factory=list, init=False)  # probe log-probs at the previous publish

    async def publish(self, version: int) -> dict[str, float]:
        """Publish and verify. Ends the policy's phase on the GPUs and begins that of the engines.

        Returns `sync/probe_gap` (mean log-prob mismatch of the probe, nats) and `sync/probe_moved` (mean change of the
        policy's own probe since the previous publish). A fake engine has no weights and returns nothing.

        Raises:
            WeightSyncError: digests or probe log-probs differ.
            FloatingPointError: the policy's weights are not finite; nothing is published.
        """
        if not await self.engines.hold_weights():
            await self.policy.offload()
            await self._pause()
            await self.engines.confirm_weights(version)
            await self._resume()
            return {}
        expected = await self.policy.probe(self.probe)
        check_probe_finite(expected, version)
        await self._pause()
        await self.engines.wake_weights()
        update = await self.policy.send_weights(version)
        check_receipts(update, await self.engines.confirm_weights(version, update.folder))
        await self.policy.release_weights()
        await self.engines.wake_cache()
        await self._resume()
        before, self._before = self._before, expected
        moved = {"sync/probe_moved": fmean(abs(x - y) for x, y in zip(expected, before, strict=True))} if before else {}
        gap = check_probe(expected, await self.engines.log_probs(self.probe), self.tolerance)
        return {"sync/probe_gap": gap, **moved}

    async def _pause(self) -> None:
        if self.in_flight:
            await self.engines.pause()

    async def _resume(self) -> None:
        if self.in_flight:
            await self.engines.resume()
