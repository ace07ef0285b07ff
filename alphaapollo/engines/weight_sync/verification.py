"""Verification that the engines hold the weights that the trainer sent, and that they compute and sample with them.

There are three checks. The digest covers every parameter, but misses a layer that computes with a stale packed copy
(tied embeddings on vLLM's CPU engine). The log-prob probe of a few tokens detects such layers, but does not depend on
every parameter. For a vision-language model, an image precedes these tokens, so that the probe also detects image
features that an engine computed with earlier weights. A few tokens that the engine samples after the probe detect what
changes only sampling, e.g. a KV cache of lower precision."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from alphaapollo.engines.weight_sync.transport import WeightReceipt, WeightUpdate
from alphaapollo.types import ImageInput, Sampling

# Tolerances of the mean |log-prob difference|, in nats. float32: at most 1e-5 if all weights are correct, 7e-4 to 9e-3
# with one stale layer. bfloat16: about 0.02 from rounding alone, depending on the model; above 0.1,
# observability/advice.py logs a warning.
PROBE_TOLERANCE_FLOAT32 = 5e-5
PROBE_TOLERANCE_BFLOAT16 = 1.0  # of the first sync; tighten_tolerance lowers it for later syncs
SAMPLE_TOLERANCE_BFLOAT16 = 0.2  # lower limit; a mean over SAMPLED_TOKENS varies more than over the probe
SAMPLED_TOKENS = 8
MAX_PROBE_LOGPROB = 1e4  # limit of |log-prob| in nats; a uniform distribution over a million tokens has 14


class WeightSyncError(RuntimeError):
    """Error: an engine does not compute with the weights that the trainer sent."""


@dataclass(frozen=True)
class Probe:
    """Fixed tokens whose log-probs engines and trainer compute after each weight sync, and the images in them."""

    token_ids: list[int]
    images: tuple[ImageInput, ...] = ()

    def select_text(self, logprobs: Sequence[float]) -> list[float]:
        """Select the log-probs of text tokens from those of `token_ids[1:]`: models never predict placeholders."""
        placeholders = {image.placeholder_id for image in self.images}
        pairs = zip(self.token_ids[1:], logprobs, strict=True)
        return [logprob for token, logprob in pairs if token not in placeholders]

    def make_sample_request(self) -> tuple[list[int], Sampling]:
        """Return the start of the probe, and the settings to sample tokens that replace its end."""
        num_text = len(self.select_text([0.0] * (len(self.token_ids) - 1)))
        count = max(1, min(SAMPLED_TOKENS, num_text // 2))
        return self.token_ids[:-count], Sampling(max_tokens=count, temperature=1.0, seed=0)


def merge_weight_updates(updates: Sequence[WeightUpdate | None]) -> WeightUpdate:
    """Return the version and digest of the weights that the training ranks sent. Raises WeightSyncError if two ranks
    sent different weights. updates: one per rank; None: the rank sent nothing."""
    sent = [update for update in updates if update is not None]
    for update in sent[1:]:
        if update != sent[0]:
            raise WeightSyncError(
                f"training ranks sent different weights as version {sent[0].version}: digests {sent[0].digest} and "
                f"{update.digest}. This is a bug; resume from the last checkpoint."
            )
    return sent[0]


def check_weight_receipts(update: WeightUpdate, receipts: Sequence[WeightReceipt]) -> None:
    """Raise WeightSyncError if an engine has another weight version or digest than the trainer sent. receipts: one per
    engine."""
    for engine, receipt in enumerate(receipts):
        if (receipt.version, receipt.digest) != (update.version, update.digest):
            raise WeightSyncError(
                f"engine {engine} has weights of version {receipt.version} with digest {receipt.digest}, but the "
                f"trainer sent version {update.version} with digest {update.digest}. Resume from the last checkpoint."
            )


def check_probe_finite(logprobs: Sequence[float], version: int) -> None:
    """Raise FloatingPointError if a log-prob of the probe is non-finite, or its magnitude exceeds MAX_PROBE_LOGPROB."""
    worst = max(logprobs, key=lambda value: abs(value) if math.isfinite(value) else math.inf)
    if not abs(worst) <= MAX_PROBE_LOGPROB:  # also true for NaN
        raise FloatingPointError(
            f"the policy's weights are corrupt: a test token has log-prob {worst:g}. Weight version {version} was "
            "neither sent to the engines nor saved. Run the same command with a lower "
            "actor_rollout_ref.actor.optim.lr to resume from the last checkpoint."
        )


def tighten_tolerance(tolerance: float, first_difference: float) -> float:
    """Return the tolerance of later syncs, from the difference between engine and trainer at the first sync."""
    if tolerance == PROBE_TOLERANCE_FLOAT32:
        return tolerance
    return min(tolerance, max(0.05, 8 * first_difference))


def check_probe_log_probs(
    trainer_logprobs: Sequence[Sequence[float]], engine_logprobs: Sequence[Sequence[float]], tolerance: float, text: str
) -> float:
    """Compare log-probs of trainer and engines, one list per engine. Returns the mean absolute difference of the worst
    engine, in nats. Raises WeightSyncError if it exceeds `tolerance`. text: name of the compared tokens in the error.
    """
    pairs = zip(trainer_logprobs, engine_logprobs, strict=True)
    differences = np.array([np.abs(np.subtract(trainer, engine)).mean() for trainer, engine in pairs])
    worst = float(differences.max())
    if not worst <= tolerance:  # also true if `worst` is NaN, which numpy's max and argmax find
        raise WeightSyncError(
            f"after a weight sync, the log-probs of engine {differences.argmax()} differ from the trainer's by "
            f"{worst:.2e} nats on average over {text} (tolerance {tolerance:.0e}): the engine received the weights but "
            "its forward pass uses others, or an argument in rollout.engine_kwargs changes it. Resume from the last "
            "checkpoint."
        )
    return worst
