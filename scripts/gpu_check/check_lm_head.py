"""The chunked LM head against dense float32: log-probs, entropy, gradients, seconds and peak memory."""

from __future__ import annotations

import torch
from torch import Tensor

from alphaapollo.models.lm_head import LmHead, LmHeadInput, compute_token_stats
from scripts.gpu_check.device import GIB
from scripts.gpu_check.kit import Kit, relative


def run(kit: Kit) -> None:
    tokens, words, width = (16_384, 151_936, 896) if kit.on_gpu else (512, 4096, 64)
    dtype = torch.bfloat16 if kit.on_gpu else torch.float32
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator).to(kit.device, dtype).requires_grad_()
    weight = (torch.randn(words, width, generator=generator) * 0.05).to(kit.device, dtype).requires_grad_()
    targets = torch.randint(words, (tokens,), generator=generator).to(kit.device)
    slopes = torch.randn(tokens, generator=generator).to(kit.device)

    def compute(needs_entropy: bool = True) -> Tensor:
        hidden.grad = weight.grad = None
        stats = compute_token_stats(LmHeadInput(hidden, LmHead(weight)), targets, 0.9, needs_entropy=needs_entropy)
        entropy = 0.0 if stats.entropy is None else 0.01 * stats.entropy
        (stats.logprobs * slopes + entropy).sum().backward()
        return stats.logprobs.detach()

    kit.record("seconds", kit.time(compute))
    kit.record("seconds without entropy", kit.time(lambda: compute(needs_entropy=False)))
    kit.memory.reset_peak()
    before = kit.memory.get_allocated()
    ours = compute()
    peak, dense = (kit.memory.get_peak() - before) / GIB, 4 * tokens * words / GIB
    kit.record("peak_gib", peak)
    kit.record("dense_logits_gib", dense)
    logprobs, grad_hidden, grad_weight = dense_in_parts(hidden, weight, targets, slopes)
    assert hidden.grad is not None and weight.grad is not None
    errors = {
        "logprobs": float((ours - logprobs).abs().mean()),
        "grad_hidden": relative(hidden.grad, grad_hidden),
        "grad_weight": relative(weight.grad, grad_weight),
    }
    for name, error in errors.items():
        kit.record(name, error)
    assert max(errors.values()) < (0.02 if kit.on_gpu else 1e-4), errors
    assert not kit.on_gpu or peak < 0.6 * dense, "chunks need far less memory than dense logits"


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
