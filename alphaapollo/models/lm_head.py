"""Log-probs, entropy and the divergence from another model, computed from hidden states in chunks of tokens.

The float32 logits of a chunk, [chunk, V], exist only while it is computed; the backward pass recomputes them. Gradients
are in closed form (z: logits after temperature, p = softmax(z), H: entropy):

    d logp / dz_v = [v = target] - p_v      d H / dz_v = -p_v (log p_v + H)      divergences: algorithms/divergence.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from alphaapollo.algorithms.divergence import Divergence, distribution_overlap, forward_kl, kl
from alphaapollo.models.cpu.linear import compute_weight_grad, linear

CHUNK_LOGITS = {"cpu": 2**22, "cuda": 2**27}  # per chunk: 16 MiB of float32 fit into a CPU cache, 512 MiB fill a GPU


class TokenStats(NamedTuple):
    """Statistics of n response tokens, float32 [n] each. A NamedTuple, so that FSDP finds its tensors."""

    logprobs: Tensor
    entropy: Tensor | None
    divergence: Tensor | None  # from the frozen model, over the vocabulary (DivergenceTarget)
    reverse_kl: Tensor | None = None  # KL(policy||frozen model); reverse_kl, forward_kl and agreement have no gradient
    forward_kl: Tensor | None = None  # KL(frozen model||policy)
    agreement: Tensor | None = None  # overlap of both models' distributions


@dataclass(frozen=True)
class LmHead:
    """Output projection: logits = cap(scale * (hidden W^T + bias)), cap(x) = softcap * tanh(x / softcap)."""

    weight: Tensor  # [V, H]
    bias: Tensor | None = None  # [V]
    scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True)
class LmHeadInput:
    """Hidden states of n tokens, and the output head that computes logits from them."""

    states: Tensor  # [n, H]
    head: LmHead


@dataclass(frozen=True)
class DivergenceTarget:
    """Frozen model (reference or teacher) from which the policy's divergence is computed, at the same temperature."""

    hidden: LmHeadInput  # hidden states of the frozen model without gradient, and its head with the policy's vocabulary
    divergence: Divergence
    with_statistics: bool = False  # also compute reverse_kl, forward_kl and agreement


def compute_token_stats(
    hidden: LmHeadInput,
    targets: Tensor,
    temperature: float,
    needs_entropy: bool = False,
    divergence_target: DivergenceTarget | None = None,
    chunk_logits: int | None = None,
) -> TokenStats:
    """Compute log-probs of target tokens under softmax(logits / temperature), and optionally entropy and divergence.

    Args:
        hidden: hidden states [n, H] of the tokens before the targets.
        targets: token ids, int64 [n].
        chunk_logits: maximum number of logits in memory at a time; None: a limit chosen for the device.
    """
    states, head = hidden.states, hidden.head
    limit = CHUNK_LOGITS.get(states.device.type, CHUNK_LOGITS["cuda"]) if chunk_logits is None else chunk_logits
    chunks = _ChunkedHead(head, temperature, needs_entropy, divergence_target, max(1, limit // head.weight.shape[0]))
    logprobs, entropy, divergence, *extra = _TokenStatsFunction.apply(states, head.weight, head.bias, targets, chunks)
    divergence = None if divergence_target is None else divergence
    return TokenStats(logprobs, entropy if needs_entropy else None, divergence, *extra)


@dataclass(frozen=True)
class _ChunkedHead:
    """Output head that is applied to one chunk of tokens at a time, and the settings of compute_token_stats."""

    head: LmHead
    temperature: float
    needs_entropy: bool
    divergence_target: DivergenceTarget | None
    chunk_size: int  # tokens

    def iterate_chunks(self, num_tokens: int) -> Iterator[slice]:
        starts = range(0, num_tokens, self.chunk_size)
        return (slice(start, min(start + self.chunk_size, num_tokens)) for start in starts)

    def compute_logits(self, hidden: Tensor, head: LmHead) -> Tensor:
        """Compute logits, with scale, softcap and temperature applied. [c, H] -> float32 or float64 [c, V]"""
        logits = linear(hidden, head.weight)
        if head.bias is not None:
            logits = logits + head.bias
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        factor = head.scale / (head.softcap or self.temperature)
        if factor != 1.0:
            logits.mul_(factor)
        if head.softcap is not None:
            logits.tanh_().mul_(head.softcap / self.temperature)
        return logits

    def compute_frozen_model_logprobs(self, chunk: slice) -> Tensor:
        """Compute the frozen model's log-probs of all tokens in the vocabulary. [c, V]"""
        assert self.divergence_target is not None
        hidden = self.divergence_target.hidden
        return self.compute_logits(hidden.states[chunk], hidden.head).log_softmax(dim=-1)


class _TokenStatsFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunks: _ChunkedHead
    ) -> tuple[Tensor, ...]:
        num_tokens, target = hidden.shape[0], chunks.divergence_target
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, normaliser, entropy, divergence = (hidden.new_zeros(num_tokens, dtype=dtype) for _ in range(4))
        extra = [torch.zeros_like(logprobs) for _ in range(3)] if target and target.with_statistics else []
        saved_logits = None
        for chunk in chunks.iterate_chunks(num_tokens):
            logits = chunks.compute_logits(hidden[chunk], chunks.head)
            top = logits.amax(dim=-1, keepdim=True)
            p = (logits - top).exp_()
            total = p.sum(dim=-1)
            normaliser[chunk] = top[:, 0] + total.log()
            logprobs[chunk] = logits.gather(1, targets[chunk, None])[:, 0] - normaliser[chunk]
            if chunks.needs_entropy:
                entropy[chunk] = normaliser[chunk] - torch.linalg.vecdot(p, logits) / total
            if target is not None:
                logp, logq = logits - normaliser[chunk, None], chunks.compute_frozen_model_logprobs(chunk)
                divergence[chunk] = target.divergence.value(logp, logq)
                for column, statistic in zip(extra, (kl, forward_kl, distribution_overlap), strict=False):
                    column[chunk] = statistic(logp, logq)
            saved_logits = logits if num_tokens <= chunks.chunk_size else None
        ctx.chunks, ctx.needs_bias = chunks, bias is not None and ctx.needs_input_grad[2]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, targets, normaliser, entropy, saved_logits)
        ctx.mark_non_differentiable(*extra)
        return logprobs, entropy, divergence, *extra

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, grad_divergence: Tensor | None, *_: Any
    ) -> tuple[Tensor, Tensor | None, Tensor | None, None, None]:
        hidden, weight, targets, normaliser, entropy, saved_logits = ctx.saved_tensors
        chunks: _ChunkedHead = ctx.chunks
        head = chunks.head
        grad_hidden = torch.empty_like(hidden)
        grad_weight: Tensor | None = None
        grad_bias = hidden.new_zeros(weight.shape[0], dtype=normaliser.dtype) if ctx.needs_bias else None
        for chunk in chunks.iterate_chunks(hidden.shape[0]):
            logits = chunks.compute_logits(hidden[chunk], chunks.head) if saved_logits is None else saved_logits
            logp = logits - normaliser[chunk, None]
            slope = torch.zeros_like(normaliser[chunk, None])  # d loss / d z_v as a multiple of p_v
            if grad_logprobs is not None:
                slope = slope - grad_logprobs[chunk, None]
            if grad_entropy is not None:
                slope = slope - grad_entropy[chunk, None] * (logp + entropy[chunk, None])
            towards_target = None
            if grad_divergence is not None and chunks.divergence_target is not None:
                divergence = chunks.divergence_target.divergence
                towards_target = divergence.gradient(logp, chunks.compute_frozen_model_logprobs(chunk))
            grad = logp.exp_().mul_(slope)
            if towards_target is not None and grad_divergence is not None:
                grad.add_(towards_target.mul_(grad_divergence[chunk, None]))
            if grad_logprobs is not None:
                grad.scatter_add_(1, targets[chunk, None], grad_logprobs[chunk, None])
            if head.softcap is not None:  # turn the gradient of the logits into that of hidden W^T + bias
                grad.addcmul_(grad * (chunks.temperature / head.softcap) ** 2, logits.square(), value=-1.0)
            grad.mul_(head.scale / chunks.temperature)
            if grad_bias is not None:
                grad_bias += grad.sum(dim=0)
            grad = grad.to(hidden.dtype)
            grad_hidden[chunk] = linear(grad, weight.t())
            if ctx.needs_input_grad[1]:
                part = compute_weight_grad(grad, hidden[chunk])
                grad_weight = part.to(normaliser.dtype) if grad_weight is None else grad_weight.add_(part)
        if grad_weight is None and ctx.needs_input_grad[1]:  # this rank has no tokens
            grad_weight = torch.zeros_like(weight, dtype=normaliser.dtype)
        bias = None if grad_bias is None else grad_bias.to(weight.dtype)
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), bias, None, None
