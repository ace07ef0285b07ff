"""The proof that engines hold the weights that the trainer sent, and compute with them.

Two proofs, for each misses what the other sees: a digest cannot tell that a layer computes with a stale packed copy
(tied embeddings on vLLM's CPU engine), a probe of a few tokens cannot see every parameter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from alphaapollo.types import WeightReceipt, WeightUpdate

GAP_FLOAT32 = 5e-5  # mean |difference| in nats: up to 1e-7 when right, 7e-4 to 9e-3 with one stale layer
GAP_BFLOAT16 = 1.0  # bfloat16 itself makes 0.02, and may make more: from 0.1 on it is told (observability/advice.py)
ABSURD = 1e4  # nats a token; a vocabulary of a million has 14 on average, and logits far above 100 are never trained


class WeightSyncError(RuntimeError):
    """An engine does not hold the weights that the trainer sent."""


def agreed(updates: Sequence[WeightUpdate | None]) -> WeightUpdate:
    """What the ranks have sent, one a rank. Raises WeightSyncError where those that write have not the same weights."""
    sent = [update for update in updates if update is not None]
    for update in sent[1:]:
        if update != sent[0]:
            raise WeightSyncError(
                f"training ranks sent different weights as version {sent[0].version}: digests {sent[0].digest} and "
                f"{update.digest}."
            )
    return sent[0]


def check_receipts(update: WeightUpdate, receipts: Sequence[WeightReceipt]) -> None:
    """Raises WeightSyncError where an engine's version or digest is not the trainer's. receipts: one an engine."""
    for engine, receipt in enumerate(receipts):
        if (receipt.version, receipt.digest) != (update.version, update.digest):
            raise WeightSyncError(
                f"engine {engine} holds version {receipt.version} with digest {receipt.digest} after publishing "
                f"version {update.version} with digest {update.digest}: its parameters are not the trainer's."
            )


def check_sound(logprobs: Sequence[float], version: int) -> None:
    """Raises FloatingPointError where a log-prob of the trainer's own probe is no number, or one that only ruined
    weights give."""
    worst = max(logprobs, key=lambda value: abs(value) if math.isfinite(value) else math.inf)
    if not abs(worst) <= ABSURD:
        raise FloatingPointError(
            f"the policy gives a token of the probe a log-prob of {worst:g} (before publish {version}): its weights "
            "are ruined. Nothing of them is published or saved; the same command goes on from the last checkpoint. Add "
            "a lower actor_rollout_ref.actor.optim.lr to it."
        )


def check_probe(expected: Sequence[float], held: Sequence[Sequence[float]], tolerance: float) -> float:
    """The largest mean gap between the trainer's log-probs of the probe and an engine's, in nats. Raises
    WeightSyncError where it is above `tolerance`. held: one list an engine."""
    gaps = [float(np.abs(np.array(own) - np.array(expected)).mean()) for own in held]
    worst = max(gaps)
    if not worst <= tolerance:  # also catches nan
        raise WeightSyncError(
            f"after publishing, the log-probs of engine {gaps.index(worst)} differ from the trainer's by "
            f"{worst:.2e} nats on average over {len(expected)} probe tokens (allowed: {tolerance:.0e}): "
            "it holds the weights but does not compute with them."
        )
    return worst
