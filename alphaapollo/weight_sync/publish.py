"""Publishing weights, with proof that the engines hold what the trainer sent (proof.py).

policy.probe          log-probs of a few tokens; it rests: an engine's weights wake into what torch would keep
engines.pause         in flight only: what runs stops between two tokens
engines.wake_weights  memory for the weights alone: the policy still holds the GPU
policy.send_weights   into shared memory, or by vLLM's own transfer into the engines
engines.confirm       out of shared memory, where it went there; proof: digests equal?
policy.release        it lets go of what carried them, and of the GPU
engines.wake_cache    which takes all that they may
engines.resume        in flight only
engines.log_probs     proof: equal to the policy's? Beside what goes on, of which nothing is trained on before
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean
from typing import Protocol

from alphaapollo.types import WeightReceipt, WeightUpdate
from alphaapollo.weight_sync.verification import check_probe, check_receipts, check_sound


class Trainer(Protocol):
    """The side that sends: controller.handles.PolicyGroup."""

    async def send_weights(self, version: int) -> WeightUpdate: ...

    async def release_weights(self) -> None: ...

    async def probe(self, token_ids: list[int]) -> list[float]: ...

    async def rest(self) -> None: ...


class Engines(Protocol):
    """The side that receives: controller.handles.EngineGroup."""

    async def hold_weights(self) -> bool: ...

    async def pause(self, keep_cache: bool = False) -> None: ...

    async def resume(self) -> None: ...

    async def wake_weights(self) -> None: ...

    async def confirm_weights(self, version: int, folder: str = "") -> list[WeightReceipt]: ...

    async def wake_cache(self) -> None: ...

    async def log_probs(self, token_ids: list[int]) -> list[list[float]]: ...


@dataclass
class WeightPublisher:
    """Keeps the engines on the trainer's weights; `tolerance` is the largest mean gap of the probe in nats."""

    policy: Trainer
    engines: Engines
    probe: list[int]  # a few token ids
    tolerance: float
    in_flight: bool = False  # requests may be running: they are paused
    keep_cache: bool = False  # of those
    _before: list[float] = field(default_factory=list, init=False)  # what the probe gave at the publish before

    async def publish(self, version: int) -> dict[str, float]:
        """Publish, prove, and return the measured gap, and how far the policy has moved since the publish before; the
        policy's phase on the GPUs ends, that of the engines begins. A fake engine has no weights, so there is nothing
        to do.

        Raises:
            WeightSyncError: any difference.
            FloatingPointError: weights that are ruined; nothing is published.
        """
        if not await self.engines.hold_weights():
            await self.policy.rest()
            await self._pause()
            await self.engines.confirm_weights(version)
            await self._resume()
            return {}
        expected = await self.policy.probe(self.probe)
        check_sound(expected, version)
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
            await self.engines.pause(self.keep_cache)

    async def _resume(self) -> None:
        if self.in_flight:
            await self.engines.resume()
