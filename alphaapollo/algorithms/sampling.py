"""Answers sampled from a model in this process: left-padded rows, one token a step for all of them. Slow and plain, for
comparison with vLLM and for a model in the midst of its training."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from alphaapollo.types import Completion, Sampling, StopReason
from alphaapollo.utils.heartbeat import HEARTBEAT


@dataclass
class PendingCompletion:
    """An answer on its way."""

    token_ids: list[int]  # what it follows
    sampling: Sampling
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.sampling.seed)

    @property
    def stopped(self) -> bool:
        return bool(self.sampled) and self.sampled[-1] in self.sampling.stop_token_ids

    @property
    def done(self) -> bool:
        return self.stopped or len(self.sampled) == self.sampling.max_tokens

    def completion(self, version: int, earlier_versions: tuple[tuple[int, int], ...] = ()) -> Completion:
        reason = StopReason.STOP if self.stopped else StopReason.LENGTH
        return Completion(self.sampled, self.logprobs, reason, version, earlier_versions=earlier_versions)


class Forward(Protocol):
    """As next_logits, of one model."""

    def __call__(self, tokens: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> tuple[Tensor, Any]: ...


def next_logits(model: Any, tokens: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> tuple[Tensor, Any]:
    """Logits [B, V] (float32) after the last of `tokens`, by the model's own forward pass, and the cache with them.

    tokens, positions [B, t]: those that the cache lacks; mask [B, so far]: 0 where a row is padded.
    """
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    output = model(tokens, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True, **last)
    return output.logits[:, -1].float(), output.past_key_values


def decode(
    forward: Forward, draws: Sequence[PendingCompletion], device: torch.device, ends: Callable[[bool], bool]
) -> None:
    """Sample on, token by token, until `ends(all draws are done)` says so, which is asked after each."""
    contexts = [draw.token_ids + draw.sampled for draw in draws]  # sampled: before a pause
    longest = max(map(len, contexts))
    padding = torch.tensor([longest - len(context) for context in contexts], device=device)
    last = torch.tensor([len(draw.token_ids) + draw.sampling.max_tokens - 1 for draw in draws], device=device)
    tokens = torch.tensor([[0] * (longest - len(context)) + context for context in contexts], device=device)
    cache = None
    for length in itertools.count(longest):
        places = torch.arange(length, device=device)
        mask = (places >= padding[:, None]).long()
        positions = (places - padding[:, None]).clamp(min=0).minimum(last[:, None])  # rows that are done go on, unread
        logits, cache = forward(tokens, mask, positions[:, -tokens.shape[1] :], cache)
        HEARTBEAT.tick()
        rows = zip(logits.cpu(), draws, strict=True)
        chosen = [sample_token(row, draw.sampling, draw.generator) for row, draw in rows]
        for draw, (token, logprob) in zip(draws, chosen, strict=True):
            if not draw.done:
                draw.sampled.append(token)
                draw.logprobs.append(logprob)
        if ends(all(draw.done for draw in draws)):
            return
        tokens = torch.tensor([[token] for token, _ in chosen], device=device)


def sample_token(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> tuple[int, float]:
    """A token drawn from logits [V] (float32), and its log-prob after temperature, before top-p and top-k."""
    if sampling.temperature == 0:
        token = int(logits.argmax())
        return token, float(logits.log_softmax(dim=-1)[token])
    logprobs = (logits / sampling.temperature).log_softmax(dim=-1)
    ordered, order = logprobs.sort(descending=True)
    kept = torch.ones_like(ordered, dtype=torch.bool)
    if sampling.top_k > 0:
        kept[sampling.top_k :] = False
    if sampling.top_p < 1:
        before = ordered.masked_fill(~kept, -torch.inf).softmax(dim=-1).cumsum(dim=-1).roll(1)
        before[0] = 0.0
        kept &= before < sampling.top_p  # the token that crosses top_p is kept
    noise = torch.empty_like(ordered).exponential_(generator=generator)
    place = int((ordered.exp() / noise).masked_fill(~kept, -1.0).argmax())
    token = int(order[place])
    return token, float(logprobs[token])
