"""From hidden states to log-probs, entropy and the divergence from another model, in chunks of tokens.

(The critic's value head, one number a token, is in critic.py; FSDP keeps it in float32: sharding.py.)

A chunk's logits [chunk, V] in float32 exist only while the chunk is computed; the backward pass computes them again.
Gradients are in closed form (z: logits after temperature, p = softmax(z), H: entropy):

    d logp / dz_v = [v = target] - p_v      d H / dz_v = -p_v (log p_v + H)      divergences: algorithms/divergence.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from alphaapollo.algorithms.divergence import Divergence, forward_kl, kl, overlap
from alphaapollo.models.cpu.linear import outer, product

CHUNK_LOGITS = {
    "cpu": 2**22,
    "cuda": 2**27,
}  # of one chunk: 16 MiB of float32 keep to a CPU's cache, 512 MiB fill a GPU


class TokenStats(NamedTuple):
    """Of n response tokens, float32 [n] each; None where not asked for. A NamedTuple: FSDP looks inside for tensors."""

    logprobs: Tensor
    entropy: Tensor | None
    divergence: Tensor | None  # from the other model, over the whole vocabulary
    reverse_kl: Tensor | None = None  # these three without a gradient: KL(policy||other),
    forward_kl: Tensor | None = None  # KL(other||policy)
    agreement: Tensor | None = None  # and the overlap of both distributions


@dataclass(frozen=True)
class Head:
    """The output projection: logits = cap(scale * (hidden W^T + bias)), cap(x) = softcap * tanh(x / softcap)."""

    weight: Tensor  # [V, H]
    bias: Tensor | None = None  # [V]
    scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True)
class Hidden:
    """What a head reads."""

    states: Tensor  # [n, H]
    head: Head


@dataclass(frozen=True)
class Other:
    """A frozen model to compare whole distributions with, at the same temperature; it gets no gradient."""

    hidden: Hidden  # its head has the policy's vocabulary
    divergence: Divergence
    shown: bool = False  # the statistics without a gradient are wanted, too


def token_stats(
    hidden: Tensor,
    targets: Tensor,
    head: Head,
    temperature: float,
    need_entropy: bool = False,
    other: Other | None = None,
    chunk_logits: int | None = None,
) -> TokenStats:
    """Log-prob of each target under softmax(logits / temperature), and what else is asked for.

    Args:
        hidden: [n, H], the state before each target.
        targets: int64 [n].
        other: adds the divergence from it.
        chunk_logits: logits in memory at a time.
    """
    limit = CHUNK_LOGITS.get(hidden.device.type, CHUNK_LOGITS["cuda"]) if chunk_logits is None else chunk_logits
    work = _Work(head, temperature, need_entropy, other, max(1, limit // head.weight.shape[0]))
    logprobs, entropy, divergence, *shown = _TokenStats.apply(hidden, head.weight, head.bias, targets, work)
    stats = TokenStats(logprobs, entropy if need_entropy else None, None if other is None else divergence)
    return stats._replace(reverse_kl=shown[0], forward_kl=shown[1], agreement=shown[2]) if shown else stats


@dataclass(frozen=True)
class _Work:
    head: Head
    temperature: float
    need_entropy: bool
    other: Other | None
    chunk: int  # tokens

    def chunks(self, num_tokens: int) -> Iterator[slice]:
        return (slice(start, min(start + self.chunk, num_tokens)) for start in range(0, num_tokens, self.chunk))

    def logits(self, hidden: Tensor, head: Head) -> Tensor:
        """After scale, cap and temperature. [c, H] -> float32 [c, V] (float64 stays)."""
        logits = product(hidden, head.weight)
        if head.bias is not None:
            logits = logits + head.bias
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        factor = head.scale / (head.softcap or self.temperature)
        if factor != 1.0:
            logits.mul_(factor)
        if head.softcap is not None:
            logits.tanh_().mul_(head.softcap / self.temperature)
        return logits

    def to_raw(self, grad: Tensor, logits: Tensor) -> Tensor:
        """Gradient by `logits` -> gradient by hidden W^T + bias, in place."""
        head = self.head
        if head.softcap is not None:
            grad.addcmul_(grad * (self.temperature / head.softcap) ** 2, logits.square(), value=-1.0)
        return grad.mul_(head.scale / self.temperature)

    def other_logprobs(self, chunk: slice) -> Tensor:
        assert self.other is not None
        return self.logits(self.other.hidden.states[chunk], self.other.hidden.head).log_softmax(dim=-1)


class _TokenStats(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, work: _Work
    ) -> tuple[Tensor, ...]:
        num_tokens, other = hidden.shape[0], work.other
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, normaliser, entropy, divergence = (hidden.new_zeros(num_tokens, dtype=dtype) for _ in range(4))
        shown = [torch.zeros_like(logprobs) for _ in range(3)] if other is not None and other.shown else []
        whole = None
        for chunk in work.chunks(num_tokens):
            logits = work.logits(hidden[chunk], work.head)
            top = logits.amax(dim=-1, keepdim=True)
            p = (logits - top).exp_()
            total = p.sum(dim=-1)
            normaliser[chunk] = top[:, 0] + total.log()
            logprobs[chunk] = logits.gather(1, targets[chunk, None])[:, 0] - normaliser[chunk]
            if work.need_entropy:
                entropy[chunk] = normaliser[chunk] - torch.linalg.vecdot(p, logits) / total
            if other is not None:
                logp, logq = logits - normaliser[chunk, None], work.other_logprobs(chunk)
                divergence[chunk] = other.divergence.value(logp, logq)
                for column, statistic in zip(shown, (kl, forward_kl, overlap), strict=False):
                    column[chunk] = statistic(logp, logq)
            whole = logits if num_tokens <= work.chunk else None
        ctx.work, ctx.needs_bias = work, bias is not None and ctx.needs_input_grad[2]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, targets, normaliser, entropy, whole)
        ctx.mark_non_differentiable(*shown)
        return logprobs, entropy, divergence, *shown

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, grad_other: Tensor | None, *_: Any
    ) -> tuple[Tensor, Tensor | None, Tensor | None, None, None]:
        hidden, weight, targets, normaliser, entropy, whole = ctx.saved_tensors
        work: _Work = ctx.work
        grad_hidden = torch.empty_like(hidden)
        grad_weight: Tensor | None = None
        grad_bias = hidden.new_zeros(weight.shape[0], dtype=normaliser.dtype) if ctx.needs_bias else None
        for chunk in work.chunks(hidden.shape[0]):
            logits = work.logits(hidden[chunk], work.head) if whole is None else whole
            logp = logits - normaliser[chunk, None]
            slope = torch.zeros_like(normaliser[chunk, None])  # gradient by z_v, as a multiple of p_v
            if grad_logprobs is not None:
                slope = slope - grad_logprobs[chunk, None]
            if grad_entropy is not None:
                slope = slope - grad_entropy[chunk, None] * (logp + entropy[chunk, None])
            nearer = None
            if grad_other is not None and work.other is not None:
                nearer = work.other.divergence.gradient(logp, work.other_logprobs(chunk))
            grad = logp.exp_().mul_(slope)
            if nearer is not None and grad_other is not None:
                grad.add_(nearer.mul_(grad_other[chunk, None]))
            if grad_logprobs is not None:
                grad.scatter_add_(1, targets[chunk, None], grad_logprobs[chunk, None])
            grad = work.to_raw(grad, logits)
            if grad_bias is not None:
                grad_bias += grad.sum(dim=0)
            grad = grad.to(hidden.dtype)
            grad_hidden[chunk] = product(grad, weight.t())
            if ctx.needs_input_grad[1]:
                part = outer(grad, hidden[chunk])
                grad_weight = part.to(normaliser.dtype) if grad_weight is None else grad_weight.add_(part)
        if grad_weight is None and ctx.needs_input_grad[1]:  # no token on this rank
            grad_weight = torch.zeros_like(weight, dtype=normaliser.dtype)
        bias = None if grad_bias is None else grad_bias.to(weight.dtype)
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), bias, None, None
