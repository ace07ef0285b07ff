"""The chunked LM head against dense float32: log-probs, entropy, gradients, and peak memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from alphaapollo.models.lm_head import LmHead, LmHeadInput, compute_token_stats
from scripts.gpu_check.kit import Kit, relative


def run(kit: Kit) -> dict[str, Any]:
    tokens, words, width = (16_384, 151_936, 896) if kit.on_gpu else (512, 4096, 64)
    dtype = torch.bfloat16 if kit.on_gpu else torch.float32
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator).to(kit.device, dtype).requires_grad_()
    weight = (torch.randn(words, width, generator=generator) * 0.05).to(kit.device, dtype).requires_grad_()
    targets = torch.randint(words, (tokens,), generator=generator).to(kit.device)
    slopes = torch.randn(tokens, generator=generator).to(kit.device)
    if kit.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if kit.on_gpu else 0
    with kit.clock() as seconds:
        stats = compute_token_stats(LmHeadInput(hidden, LmHead(weight)), targets, 0.9, needs_entropy=True)
        assert stats.entropy is not None
        (stats.logprobs * slopes + 0.01 * stats.entropy).sum().backward()
    figures: dict[str, Any] = {"seconds": seconds[0]}
    if kit.on_gpu:
        figures["peak_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
        dense = 4 * tokens * words / 2**30
        figures["dense_logits_gib"] = dense
        assert figures["peak_gib"] < 0.6 * dense, "chunks should need far less memory than dense logits"
    logprobs, grad_hidden, grad_weight = dense_in_parts(hidden, weight, targets, slopes)
    figures["logprobs"] = float((stats.logprobs.detach() - logprobs).abs().mean())
    assert hidden.grad is not None and weight.grad is not None
    figures["grad_hidden"] = relative(hidden.grad, grad_hidden)
    figures["grad_weight"] = relative(weight.grad, grad_weight)
    limit = 0.02 if kit.on_gpu else 1e-4
    assert max(figures[name] for name in ("logprobs", "grad_hidden", "grad_weight")) < limit, figures
    return figures


def dense_in_parts(hidden: Tensor, weight: Tensor, targets: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Autograd in float32, 2048 tokens at a time to fit on a small GPU."""
    matrix = weight.detach().float().requires_grad_()
    logprobs, grads = [], []
    for part in torch.arange(len(targets), device=targets.device).split(2048):
        states = hidden.detach()[part].float().requires_grad_()
        logp = (states @ matrix.t() / 0.9).log_softmax(-1)
        chosen = logp.gather(1, targets[part, None])[:, 0]
        entropy = -(logp.exp() * logp).sum(-1)
        (chosen * slopes[part] + 0.01 * entropy).sum().backward()
        assert states.grad is not None
        logprobs.append(chosen.detach())
        grads.append(states.grad)
    assert matrix.grad is not None
    return torch.cat(logprobs), torch.cat(grads), matrix.grad
