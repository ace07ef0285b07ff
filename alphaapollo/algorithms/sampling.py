"""Sample completions from a transformers model in this process, one token per forward pass of a left-padded batch.

The hf engine uses it as a slow reference for vLLM, and SFT uses it to sample from the model during training.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from alphaapollo.types import Completion, Sampling, StopReason
from alphaapollo.utils.heartbeat import HEARTBEAT


@dataclass
class PendingCompletion:
    """A completion that is being generated."""

    prompt_ids: list[int]  # tokens of the prompt
    sampling: Sampling
    sampled: list[int] = field(default_factory=list)  # tokens of the completion so far
    logprobs: list[float] = field(default_factory=list)  # log-probs of the sampled tokens
    decode: Callable[[list[int]], str] | None = None  # needed for stop strings
    kept: list[Sequence[int]] = field(default_factory=list)  # tokens kept for each sampled token; empty: all

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.sampling.seed)

    @property
    def is_stopped(self) -> bool:
        """Whether the last sampled token is a stop token or completes a stop string."""
        if self.sampled and self.sampled[-1] in self.sampling.stop_token_ids:
            return True
        text = self.decode(self.sampled) if self.decode and self.sampling.stop else ""
        return any(stop in text for stop in self.sampling.stop)

    @property
    def is_done(self) -> bool:
        return self.is_stopped or len(self.sampled) == self.sampling.max_tokens

    def to_completion(self, version: int, earlier_version_token_counts: Sequence[tuple[int, int]] = ()) -> Completion:
        """Create the finished completion. version, earlier_version_token_counts: see Completion."""
        reason = StopReason.STOP if self.is_stopped else StopReason.LENGTH
        return Completion(self.sampled, self.logprobs, reason, version, 0, tuple(earlier_version_token_counts))


Cache = Any  # KV cache of transformers
Forward = Callable[[Tensor, Tensor, Tensor, Cache], tuple[Tensor, Cache]]
"""Function `next_logits` of one model: (tokens, mask, positions, cache) -> (logits, cache)."""


def next_logits(model: Any, tokens: Tensor, mask: Tensor, positions: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
    """Compute the logits [B, V] (float32) of the next token, and the updated KV cache.

    Args:
        tokens: [B, t] tokens that are not in the cache yet.
        mask: [B, length so far] 0 on padding.
        positions: [B, t] position ids of `tokens`.
    """
    keep = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    output = model(tokens, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True, **keep)
    return output.logits[:, -1].float(), output.past_key_values


def decode_batch(
    forward: Forward, pending: Sequence[PendingCompletion], device: torch.device, should_stop: Callable[[bool], bool]
) -> None:
    """Extend the pending completions, in place and one token at a time, until `should_stop` returns True.

    should_stop: called after each token; its argument is True if all completions are done.
    """
    contexts = [draw.prompt_ids + draw.sampled for draw in pending]  # `sampled` is not empty after a pause
    longest = max(map(len, contexts))
    padding = torch.tensor([longest - len(context) for context in contexts], device=device)
    ends = [len(draw.prompt_ids) + draw.sampling.max_tokens for draw in pending]
    last_positions = torch.tensor(ends, device=device) - 1
    tokens = torch.tensor([[0] * (longest - len(context)) + context for context in contexts], device=device)
    cache = None
    for length in itertools.count(longest):
        columns = torch.arange(length, device=device)
        mask = (columns >= padding[:, None]).long()
        # finished rows continue at their last position, and their samples are ignored
        positions = (columns - padding[:, None]).clamp(min=0).minimum(last_positions[:, None])
        logits, cache = forward(tokens, mask, positions[:, -tokens.shape[1] :], cache)
        HEARTBEAT.tick()
        rows = zip(logits.cpu(), pending, strict=True)
        samples = [sample_among_kept(row, draw.sampling, draw.generator) for row, draw in rows]
        for draw, (token, logprob, kept) in zip(pending, samples, strict=True):
            if not draw.is_done:
                draw.sampled.append(token)
                draw.logprobs.append(logprob)
                draw.kept.append(kept)
        if should_stop(all(draw.is_done for draw in pending)):
            return
        tokens = torch.tensor([[token] for token, *_ in samples], device=device)


def sample_token(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> tuple[int, float]:
    """Sample a token from float32 logits [V]. Returns the token and its log-prob (Engine.generate)."""
    token, logprob, _ = sample_among_kept(logits, sampling, generator)
    return token, logprob


def sample_among_kept(
    logits: Tensor, sampling: Sampling, generator: torch.Generator
) -> tuple[int, float, Sequence[int]]:
    """Sample a token from float32 logits [V]. Returns the token, its log-prob (Engine.generate), and the sorted ids
    that top-k, top-p and min-p keep, or no ids if they keep all or sampling.returns_kept_tokens is false."""
    if sampling.temperature == 0:
        token = int(logits.argmax())
        return token, float(logits.log_softmax(dim=-1)[token]), ()
    logprobs = (logits / sampling.temperature).log_softmax(dim=-1)
    ordered, order = logprobs.sort(descending=True)
    allowed = torch.ones_like(ordered, dtype=torch.bool)
    if sampling.min_p > 0:
        allowed = ordered >= ordered[0] + math.log(sampling.min_p)
    if sampling.top_k > 0:
        allowed[sampling.top_k :] = False
    if sampling.top_p < 1:
        mass_before = ordered.masked_fill(~allowed, -torch.inf).softmax(dim=-1).cumsum(dim=-1).roll(1)
        mass_before[0] = 0.0
        allowed &= mass_before < sampling.top_p  # includes the token that crosses top_p
    noise = torch.empty_like(ordered).exponential_(generator=generator)
    position = int((ordered.exp() / noise).masked_fill(~allowed, -1.0).argmax())
    token = int(order[position])
    if not sampling.returns_kept_tokens or bool(allowed.all()):
        return token, float(logprobs[token]), ()
    total = ordered[allowed].logsumexp(dim=-1)
    return token, float(logprobs[token] - total), order[allowed].sort().values.tolist()
