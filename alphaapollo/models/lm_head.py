"""Log-probs, entropy and the divergence from another model, computed from hidden states in chunks of tokens.

One matrix product computes the logits of a block of tokens in the model's dtype. They are converted to float32 and used
one chunk of the block at a time. The backward pass recomputes them, unless there is only one block. On a CPU, the
forward pass replaces the logits of a single block by d logp / dz, so the backward pass of log-probs is two products.
Gradients are in closed form (z: logits after temperature, p = softmax(z), H: entropy):

    d logp / dz_v = [v = target] - p_v      d H / dz_v = -p_v (log p_v + H)      divergences: algorithms/kl.py

If the sampler kept only some tokens (KeptLogits), log-prob and entropy are those of the softmax over these tokens. p_v
is 0 for all others, and the gradients above hold. Divergences compare complete distributions.

On a GPU, torch.compile fuses all operations of a chunk between two matrix products into two kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from alphaapollo.algorithms.kl import Divergence, distribution_overlap, forward_kl, kl, spread_tail
from alphaapollo.data.images import EXCLUDED_LOGIT
from alphaapollo.models.cpu_linear import compute_weight_grad, linear
from alphaapollo.models.kept_logits import KeptLogits


class LogitLimits(NamedTuple):
    """Number of logits that exist at a time."""

    block: int  # in the model's dtype
    chunk: int  # in float32


LOGIT_LIMITS = {"cpu": LogitLimits(2**28, 2**22), "cuda": LogitLimits(2**28, 2**28)}  # 16 MiB fit into a CPU's cache


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
    """Output projection: logits = cap(scale * (hidden W^T + bias)) with cap(x) = softcap * tanh(x / softcap). The
    rows of W after the first `num_tokens` are padding, for which no logits are computed."""

    weight: Tensor  # [V, H]
    bias: Tensor | None = None  # [V]
    scale: float = 1.0
    softcap: float | None = None
    num_tokens: int | None = None  # None: all rows
    excluded: Tensor | None = None  # int64: indices of rows whose logits are set to EXCLUDED_LOGIT


@dataclass(frozen=True)
class LmHeadInput:
    """Hidden states of n tokens, and the output head that computes logits from them."""

    states: Tensor  # [n, H]
    head: LmHead


@dataclass(frozen=True)
class TopTokens:
    """The k most probable tokens of a frozen model at n positions, and the log-probs of all other tokens together."""

    token_ids: Tensor  # int64 [n, k]; a repeated token has the same log-prob
    logprobs: Tensor  # [n, k]
    tail: Tensor  # [n]


@dataclass(frozen=True)
class WeightedModel:
    """One of several frozen models, and its weight in the divergence of each token."""

    output: LmHeadInput | TopTokens
    weights: Tensor  # [n], on the CPU: chunks in which all weights are 0 are not computed


@dataclass(frozen=True)
class DivergenceTarget:
    """Frozen models from which the policy's divergence is computed, at the same temperature."""

    hidden: LmHeadInput | Sequence[WeightedModel] | None
    """Hidden states of the frozen model without gradient, and its head with the policy's vocabulary; or several models,
    whose divergences and statistics are summed with their weights. None: the policy's own log-probs."""
    divergence: Divergence
    with_statistics: bool = False  # also compute reverse_kl, forward_kl and agreement
    top_k: int | None = None  # compare only the k most probable tokens of a model with hidden states
    selects_policy_tokens: bool = False  # top_k selects the policy's most probable tokens (arXiv 2601.20802, Eq. 11)


def compute_token_stats(
    hidden: LmHeadInput,
    targets: Tensor,
    temperature: float,
    needs_entropy: bool = False,
    divergence_target: DivergenceTarget | None = None,
    limits: LogitLimits | None = None,
    fused: bool = False,
    kept: KeptLogits | None = None,
) -> TokenStats:
    """Compute log-probs of n target tokens under softmax(logits / temperature), and optionally entropy and divergence.
    hidden: states of the tokens before the targets. limits: chosen for the device by default.
    fused: compile the operations on logits, except a divergence. kept: tokens of the softmax of log-probs and entropy;
    None: all."""
    states, head = hidden.states, hidden.head
    limits = limits or LOGIT_LIMITS.get(states.device.type, LOGIT_LIMITS["cuda"])
    block, chunk = (max(1, limit // head.weight.shape[0]) for limit in limits)  # tokens
    fused = fused and divergence_target is None
    needs_logits = fused or divergence_target or head.softcap or head.bias is not None
    saves_slopes = not needs_logits and torch.is_grad_enabled() and len(states) <= block
    chunks = _ChunkedHead(head, temperature, needs_entropy, divergence_target, block, chunk, fused, saves_slopes, kept)
    outputs = _TokenStatsFunction.apply(states, head.weight, head.bias, targets, chunks)
    logprobs, entropy, divergence, *statistics = outputs
    divergence = None if divergence_target is None else divergence
    return TokenStats(logprobs, entropy if needs_entropy else None, divergence, *statistics)


@dataclass(frozen=True)
class _ChunkedHead:
    """Output head that is applied to one block of tokens at a time, and the settings of compute_token_stats."""

    head: LmHead
    temperature: float
    needs_entropy: bool
    divergence_target: DivergenceTarget | None
    block_size: int  # tokens
    chunk_size: int
    fused: bool
    saves_slopes: bool  # replace the single block of logits by the gradients of the log-probs
    kept: KeptLogits | None

    def iterate_blocks(self, num_tokens: int) -> Iterator[slice]:
        return split_range(0, num_tokens, self.block_size)

    def iterate_chunks(self, block: slice, raw: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield each chunk of the block, and its part of the block's raw logits."""
        return zip(split_range(block.start, block.stop, self.chunk_size), raw.split(self.chunk_size), strict=True)

    @property
    def transform(self) -> LogitTransform:
        return LogitTransform.of_head(self.head, self.temperature)

    def restrict_to_kept(self, chunk: slice, raw: Tensor) -> LogitTransform:
        """Return the transform of the logits `raw` of a chunk that leaves only the tokens that the sampler kept."""
        if self.kept is None:
            return self.transform
        return self.transform._replace(left_out=self.kept.find_left_out(chunk, raw, self.head.weight.shape[0]))

    def fuse(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return _compile(function) if self.fused else function

    def iterate_frozen_models(self, chunk: slice, logp: Tensor) -> Iterator[tuple[Tensor | float, Tensor]]:
        """Yield each frozen model's weights [c] and log-probs of all tokens [c, V]. logp: of the policy, [c, V]."""
        assert self.divergence_target is not None
        hidden = self.divergence_target.hidden
        if hidden is None:
            yield 1.0, logp
            return
        if isinstance(hidden, LmHeadInput):
            yield 1.0, self._compute_frozen_model_logprobs(hidden, chunk, logp)
            return
        for model in hidden:
            if (model_weights := model.weights[chunk]).any():
                logq = self._compute_frozen_model_logprobs(model.output, chunk, logp)
                yield model_weights.to(logp, non_blocking=True), logq

    def compute_divergence_gradient(
        self, raw: Tensor, chunk: slice, normaliser: Tensor, grad: Tensor | None
    ) -> Tensor | None:
        """Return the gradient of the chunk's transformed logits [c, V] from the divergence; None without a divergence.
        raw: logits of the chunk. grad: gradient of the divergence of each token."""
        if grad is None or self.divergence_target is None:
            return None
        result: Tensor | None = None
        logp = self.transform(raw) - normaliser[chunk, None]
        for model_weights, logq in self.iterate_frozen_models(chunk, logp):
            model_gradient = self.divergence_target.divergence.gradient(logp, logq)
            model_gradient.mul_((model_weights * grad[chunk])[:, None])
            result = model_gradient if result is None else result.add_(model_gradient)
        return result

    def _compute_frozen_model_logprobs(self, output: LmHeadInput | TopTokens, chunk: slice, logp: Tensor) -> Tensor:
        if isinstance(output, TopTokens):
            return spread_tail(logp, output.token_ids[chunk], output.logprobs[chunk].to(logp), output.tail[chunk])
        transform = LogitTransform.of_head(output.head, self.temperature)
        logq = transform(compute_raw_logits(output.states[chunk], output.head)).log_softmax(dim=-1)
        target = self.divergence_target
        if target is None or target.top_k is None:
            return logq
        top_ids = (logp if target.selects_policy_tokens else logq).topk(min(target.top_k, logq.shape[1])).indices
        tail = logq.scatter(1, top_ids, -math.inf).logsumexp(dim=-1)
        return spread_tail(logp, top_ids, logq.gather(1, top_ids), tail)


def split_range(start: int, stop: int, size: int) -> Iterator[slice]:
    """Split a range into slices of at most `size`."""
    return (slice(first, min(first + size, stop)) for first in range(start, stop, size))


class LogitTransform(NamedTuple):
    """Logits after temperature z = cap * tanh(factor * raw), or factor * raw without a cap."""

    factor: float
    cap: float | None
    excluded: Tensor | None = None
    left_out: Tensor | None = None  # bool [c, V]: tokens that the sampler did not keep

    @classmethod
    def of_head(cls, head: LmHead, temperature: float) -> LogitTransform:
        cap = None if head.softcap is None else head.softcap / temperature
        return cls(head.scale / (head.softcap or temperature), cap, head.excluded)

    def __call__(self, raw: Tensor) -> Tensor:
        """Return the logits in float32 (float64 for float64). [c, V] -> [c, V]"""
        logits = raw.to(torch.promote_types(raw.dtype, torch.float32))
        if self.factor != 1.0:
            logits = logits * self.factor
        logits = logits if self.cap is None else logits.tanh() * self.cap
        return logits if self.excluded is None else logits.index_fill(1, self.excluded, EXCLUDED_LOGIT)

    def leave_out(self, logits: Tensor) -> Tensor:
        """Exclude the tokens that the sampler did not keep, in place. [c, V] -> [c, V]"""
        return logits if self.left_out is None else logits.masked_fill_(self.left_out, EXCLUDED_LOGIT)


@lru_cache
def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


def compute_raw_logits(hidden: Tensor, head: LmHead) -> Tensor:
    """Compute logits without scale, softcap and temperature. [c, H] -> [c, V]"""
    logits = linear(hidden, head.weight[: head.num_tokens])
    return logits if head.bias is None else logits + head.bias[: head.num_tokens]


def compute_chunk_stats(
    raw: Tensor, targets: Tensor, transform: LogitTransform, needs_entropy: bool, saves_slopes: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return normaliser, log-prob of the target, and entropy (0 if it is not needed) of raw logits [c, V]; [c] each.
    saves_slopes: replace `raw` by the gradient of the log-prob with respect to it; the transform must have no cap."""
    logits = transform(raw)
    is_copy = logits is not raw or transform.left_out is None
    logits = transform.leave_out(logits if is_copy else logits.clone())
    top = logits.amax(dim=-1)
    if torch.compiler.is_compiling():  # one kernel
        exponentials = (logits - top[:, None]).exp_()
        normaliser = top + (total := exponentials.sum(dim=-1)).log()
        mean = torch.linalg.vecdot(exponentials, logits) / total
    else:  # few passes over memory
        p = logits.softmax(dim=-1)
        normaliser = top - p.amax(dim=-1).log()
        mean = torch.linalg.vecdot(p, logits) if needs_entropy else top
    logprobs = logits.gather(1, targets[:, None])[:, 0] - normaliser
    if saves_slopes:
        slopes = p.mul_(-transform.factor)
        raw.copy_(slopes.scatter_add_(1, targets[:, None], torch.full_like(slopes[:, :1], transform.factor)))
    return normaliser, logprobs, normaliser - mean if needs_entropy else torch.zeros_like(normaliser)


def compute_logit_gradient(
    raw: Tensor,
    targets: Tensor,
    transform: LogitTransform,
    normaliser: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    grad_from_divergence: Tensor | None = None,
) -> Tensor:
    """Return the gradient of raw logits [c, V] from the gradients of log-probs and entropy [c], and from
    `grad_from_divergence`, the gradient of the transformed logits [c, V]."""
    logits = transform(raw)
    logp = transform.leave_out(logits - normaliser[:, None])
    slope = torch.zeros_like(normaliser[:, None])  # d loss / d z_v as a multiple of p_v
    if grad_logprobs is not None:
        slope = slope - grad_logprobs[:, None]
    if grad_entropy is not None:
        slope = slope - grad_entropy[:, None] * (logp + entropy[:, None])
    grad = logp.exp_().mul_(slope)
    if grad_from_divergence is not None:
        grad.add_(grad_from_divergence)
    if grad_logprobs is not None and torch.compiler.is_compiling():  # a scatter would end the fused kernel
        is_target = torch.arange(raw.shape[1], device=raw.device) == targets[:, None]
        grad = grad + is_target * grad_logprobs[:, None]
    elif grad_logprobs is not None:
        grad.scatter_add_(1, targets[:, None], grad_logprobs[:, None])
    if transform.cap is not None:  # derivative of tanh
        grad.addcmul_(grad, (logits / transform.cap).square(), value=-1.0)
    factor = transform.factor * (transform.cap or 1.0)
    return (grad if factor == 1.0 else grad.mul_(factor)).to(raw.dtype)


class _TokenStatsFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunks: _ChunkedHead
    ) -> tuple[Tensor, ...]:
        num_tokens, target = hidden.shape[0], chunks.divergence_target
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, normaliser, entropy, divergence = (hidden.new_zeros(num_tokens, dtype=dtype) for _ in range(4))
        total = normaliser if chunks.kept is None else torch.zeros_like(normaliser)  # normaliser over all tokens
        functions = (kl, forward_kl, distribution_overlap) if target and target.with_statistics else ()
        statistics = [torch.zeros_like(logprobs) for _ in functions]
        raw, compute_stats = None, chunks.fuse(compute_chunk_stats)
        for block in chunks.iterate_blocks(num_tokens):
            raw = compute_raw_logits(hidden[block], chunks.head)
            for chunk, raw_part in chunks.iterate_chunks(block, raw):
                transform = chunks.restrict_to_kept(chunk, raw_part)
                normaliser[chunk], logprobs[chunk], entropy[chunk] = compute_stats(
                    raw_part, targets[chunk], transform, chunks.needs_entropy, chunks.saves_slopes
                )
                if target is None:
                    continue
                logits = chunks.transform(raw_part)
                if chunks.kept is not None:
                    total[chunk] = logits.logsumexp(dim=-1)
                policy_logp = logits - total[chunk, None]
                for model_weights, frozen_logp in chunks.iterate_frozen_models(chunk, policy_logp):
                    divergence[chunk] += model_weights * target.divergence.value(policy_logp, frozen_logp)
                    for column, function in zip(statistics, functions, strict=True):
                        column[chunk] += model_weights * function(policy_logp, frozen_logp)
        saved_logits = raw if num_tokens <= chunks.block_size else None
        ctx.chunks, ctx.needs_bias = chunks, bias is not None and ctx.needs_input_grad[2]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, targets, normaliser, total, entropy, saved_logits)
        ctx.mark_non_differentiable(*statistics)
        return logprobs, entropy, divergence, *statistics

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, grad_divergence: Tensor | None, *_: object
    ) -> tuple[Tensor, Tensor | None, Tensor | None, None, None]:
        hidden, weight, targets, normaliser, total, entropy, saved_logits = ctx.saved_tensors
        chunks: _ChunkedHead = ctx.chunks
        grad_weight: Tensor | None = None
        if chunks.saves_slopes and grad_logprobs is not None and grad_entropy is None:
            slopes, token_factors = saved_logits, grad_logprobs[:, None]
            grad_hidden = (linear(slopes, weight[: slopes.shape[1]].t()) * token_factors).to(hidden.dtype)
            if ctx.needs_input_grad[1]:
                scaled_hidden = (hidden * token_factors).to(hidden.dtype)
                grad_weight = _add_weight_grad(None, slopes, scaled_hidden, weight).to(weight.dtype)
            return grad_hidden, grad_weight, None, None, None
        saved_logits = None if chunks.saves_slopes else saved_logits
        compute_gradient = chunks.fuse(compute_logit_gradient)
        grad_hidden = torch.empty_like(hidden)
        grad_bias = hidden.new_zeros(weight.shape[0], dtype=normaliser.dtype) if ctx.needs_bias else None
        for block in chunks.iterate_blocks(hidden.shape[0]):
            raw = compute_raw_logits(hidden[block], chunks.head) if saved_logits is None else saved_logits
            grad = raw
            for chunk, raw_part in chunks.iterate_chunks(block, raw):
                part_grad = compute_gradient(
                    raw_part,
                    targets[chunk],
                    chunks.restrict_to_kept(chunk, raw_part),
                    normaliser[chunk],
                    entropy[chunk],
                    None if grad_logprobs is None else grad_logprobs[chunk],
                    None if grad_entropy is None else grad_entropy[chunk],
                    chunks.compute_divergence_gradient(raw_part, chunk, total, grad_divergence),
                )
                if chunk == block:
                    grad = part_grad
                else:  # overwrites the logits, which are no longer needed
                    raw_part.copy_(part_grad)
            if grad_bias is not None:
                grad_bias[: grad.shape[1]] += grad.sum(dim=0, dtype=grad_bias.dtype)
            grad_hidden[block] = linear(grad, weight[: grad.shape[1]].t())
            if ctx.needs_input_grad[1]:
                grad_weight = _add_weight_grad(grad_weight, grad, hidden[block], weight)
        if grad_weight is None and ctx.needs_input_grad[1]:  # this rank has no tokens
            grad_weight = torch.zeros_like(weight)
        grad_weight, grad_bias = (None if g is None else g.to(weight.dtype) for g in (grad_weight, grad_bias))
        return grad_hidden, grad_weight, grad_bias, None, None


def _add_weight_grad(total: Tensor | None, grad: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
    """Add a block's gradient of the weight [V, H] to `total`, in float32 for several blocks. grad: of raw logits."""
    part = compute_weight_grad(grad, hidden)
    if total is None and part.shape == weight.shape:
        return part
    dtype = torch.promote_types(weight.dtype, torch.float32)
    total = torch.zeros_like(weight, dtype=dtype) if total is None else total.to(dtype)
    total[: len(part)].add_(part)
    return total
