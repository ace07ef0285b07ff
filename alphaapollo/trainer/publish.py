"""Publish weights to the engines and verify that the engines compute with them (weight_sync/verification.py).

policy.probe          log-probs of a few tokens; the policy then offloads to free GPU memory for the engines
engines.pause         only with requests in flight: they stop between two tokens
engines.wake_weights  allocate weights only: the policy still holds GPU memory
policy.send_weights   into shared memory, or with vLLM's transfer into the engines
engines.confirm       load the weights if they are in shared memory; compare digests
policy.release        free the transfer buffers and the GPU
engines.wake_cache    allocate the KV cache
engines.resume        only with requests in flight
engines.log_probs     compare with the policy's probe; requests may run, but are trained on only if it matches
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean

from alphaapollo.controller.handles import EngineGroup, PolicyGroup
from alphaapollo.weight_sync.verification import check_probe, check_probe_finite, check_receipts


@dataclass
class WeightPublisher:
    """Publisher of the trainer's weights to the engines. `tolerance`: largest accepted mean probe mismatch, in nats."""

    policy: PolicyGroup
    engines: EngineGroup
    probe: list[int]  # token ids
    tolerance: float
    in_flight: bool = False  # whether requests may be running; they are paused during a publish
    _before: list[float] = field(default_factory=list, init=False)  # probe log-probs at the previous publish

    async def publish(self, version: int) -> dict[str, float]:
        """Publish the weights and verify them. Hands the GPUs over from the policy to the engines.

        Returns `sync/probe_gap` (mean log-prob mismatch of the probe, nats) and `sync/probe_moved` (mean change of the
        policy's probe since the previous publish). A fake engine has no weights and returns nothing.

        Raises:
            WeightSyncError: if digests or probe log-probs differ.
            FloatingPointError: if the policy's weights are not finite. Nothing is published.
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
