"""Verify that the engines hold the weights that the trainer sent, and compute with them.

There are two checks because each misses what the other detects: a digest does not notice a layer that computes with a
stale packed copy (tied embeddings on vLLM's CPU engine), and a probe of a few tokens does not depend on every
parameter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from alphaapollo.types import WeightReceipt, WeightUpdate

# Mean |difference| in nats. float32: at most 1e-7 when correct, 7e-4 to 9e-3 with one stale layer. bfloat16: rounding
# alone gives about 0.02; above 0.1 a warning is logged (observability/advice.py).
PROBE_TOLERANCE_FLOAT32 = 5e-5
PROBE_TOLERANCE_BFLOAT16 = 1.0
MAX_PROBE_LOGPROB = 1e4  # nats per token; a uniform distribution over a million tokens has 14


class WeightSyncError(RuntimeError):
    """An engine does not hold the weights that the trainer sent."""


def merge_updates(updates: Sequence[WeightUpdate | None]) -> WeightUpdate:
    """Return the update that all writing ranks agree on. Raises WeightSyncError if they differ. updates: one per
    rank."""
    sent = [update for update in updates if update is not None]
    for update in sent[1:]:
        if update != sent[0]:
            raise WeightSyncError(
                f"training ranks sent different weights as version {sent[0].version}: digests {sent[0].digest} and "
                f"{update.digest}."
            )
    return sent[0]


def check_receipts(update: WeightUpdate, receipts: Sequence[WeightReceipt]) -> None:
    """Raise WeightSyncError if an engine's version or digest differs from the update. receipts: one per engine."""
    for engine, receipt in enumerate(receipts):
        if (receipt.version, receipt.digest) != (update.version, update.digest):
            raise WeightSyncError(
                f"engine {engine} holds version {receipt.version} with digest {receipt.digest} after publishing "
                f"version {update.version} with digest {update.digest}: its parameters are not the trainer's."
            )


def check_probe_finite(logprobs: Sequence[float], version: int) -> None:
    """Raise FloatingPointError if a log-prob of the trainer's own probe is not finite or absurdly large."""
    worst = max(logprobs, key=lambda value: abs(value) if math.isfinite(value) else math.inf)
    if not abs(worst) <= MAX_PROBE_LOGPROB:
        raise FloatingPointError(
            f"the policy's weights are corrupt: a probe token has log-prob {worst:g} (before publish {version}). They "
            "were not published or saved. Run the same command to resume from the last checkpoint, with a lower "
            "actor_rollout_ref.actor.optim.lr."
        )


def check_probe(expected: Sequence[float], held: Sequence[Sequence[float]], tolerance: float) -> float:
    """Return the largest mean |difference| between the trainer's probe log-probs and an engine's, in nats.

    held: one list per engine. Raises WeightSyncError if it is above `tolerance`.
    """
    gaps = [float(np.abs(np.array(own) - np.array(expected)).mean()) for own in held]
    worst = max(gaps)
    if not worst <= tolerance:  # also catches nan
        raise WeightSyncError(
            f"after publishing, the log-probs of engine {gaps.index(worst)} differ from the trainer's by "
            f"{worst:.2e} nats on average over {len(expected)} probe tokens (tolerance {tolerance:.0e}): "
            "it received the weights but does not compute with them."
        )
    return worst
