from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from alphaapollo.algorithms.kl import REVERSE, Divergence
from alphaapollo.models import lm_head as head_module
from alphaapollo.models.kept_logits import KeptLogits
from alphaapollo.models.lm_head import (
    DivergenceTarget,
    LmHead,
    LmHeadInput,
    LogitLimits,
    compute_token_stats,
)
from tests.unit.plain import entropy, jsd, kl_full

NUM_TOKENS, VOCABULARY, HIDDEN = 7, 11, 5
LIMITS = [LogitLimits(block * VOCABULARY, chunk * VOCABULARY) for block, chunk in [(2, 2), (4, 2), (100, 100)]]


def every_divergence(test: Callable[..., None]) -> Callable[..., None]:
    """In one block of tokens, and in several."""
    kinds = [REVERSE, Divergence("forward"), Divergence("jsd", 0.2)]
    test = pytest.mark.parametrize("divergence", kinds, ids=lambda one: one.kind)(test)
    return pytest.mark.parametrize("limits", LIMITS)(test)


def inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    """Hidden states, weight and bias of a head, targets, and hidden states and weight of another model."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(NUM_TOKENS, HIDDEN), (VOCABULARY, HIDDEN), (VOCABULARY,), (NUM_TOKENS, HIDDEN), (VOCABULARY, HIDDEN)]
    leaves, others = [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes[:3]], shapes[3:]
    targets = torch.randint(VOCABULARY, (NUM_TOKENS,), generator=generator)
    reference = [torch.randn(shape, generator=generator, dtype=dtype) for shape in others]
    return *(leaf.requires_grad_() for leaf in leaves), targets, *reference


def assert_same(found: torch.Tensor, expected: torch.Tensor, leaves: tuple[torch.Tensor, ...]) -> None:
    """Compare values and the gradients of their weighted sum."""
    torch.testing.assert_close(found, expected)
    losses = [(torch.linspace(-1, 1, len(one), dtype=torch.float64) * one).sum() for one in (found, expected)]
    torch.testing.assert_close(*(torch.autograd.grad(loss, leaves, retain_graph=True) for loss in losses))


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_rows_that_are_padding_have_no_probability_and_no_gradient(limits: LogitLimits, softcap: float | None):
    hidden, weight, bias, targets, ref_states, ref_weight = inputs()
    targets = targets % 8
    results = []
    for size in (8, None):  # num_tokens=8, or a head of 8 rows
        heads = [
            LmHead(w[:size], b if b is None else b[:size], 1.3, softcap)
            for w, b in ((weight, bias), (ref_weight, None))
        ]
        if size is None:
            heads = [replace(head, num_tokens=8) for head in heads]
        target = DivergenceTarget(LmHeadInput(ref_states, heads[1]), REVERSE)
        stats = compute_token_stats(LmHeadInput(hidden, heads[0]), targets, 0.7, True, target, limits)
        results.append(torch.cat([stats.logprobs, stats.entropy, stats.divergence]))
    assert_same(results[1], results[0], (hidden, weight, bias))
    assert not torch.autograd.grad(results[1].sum(), weight)[0][8:].any()


@pytest.mark.parametrize("limits", [LogitLimits(1, 1), *LIMITS])
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (1.3, 2.0)])
def test_values_and_gradients_equal_plain_autograd(limits: LogitLimits, scale: float, softcap: float | None):
    hidden, weight, bias, targets, ref_states, ref_weight = inputs()
    logits = scale * (hidden @ weight.T + bias)
    logits = (softcap * torch.tanh(logits / softcap) if softcap else logits) / 0.7
    logp = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    kl = kl_full(logits, ref_states @ ref_weight.T / 0.7)
    stats = compute_token_stats(
        LmHeadInput(hidden, LmHead(weight, bias, scale, softcap)),
        targets,
        0.7,
        needs_entropy=True,
        divergence_target=DivergenceTarget(LmHeadInput(ref_states, LmHead(ref_weight)), REVERSE),
        limits=limits,
    )
    assert stats.entropy is not None and stats.divergence is not None
    torch.testing.assert_close(stats[:3], (logp, entropy(logits), kl))
    found = stats.logprobs + 0.3 * stats.entropy + 0.2 * stats.divergence
    assert_same(found, logp + 0.3 * entropy(logits) + 0.2 * kl, (hidden, weight, bias))


@every_divergence
def test_divergences_and_statistics_equal_plain_autograd(divergence: Divergence, limits: LogitLimits):
    hidden, weight, bias, targets, other_states, other_weight = inputs()
    logits, other_logits = (hidden @ weight.T + bias) / 0.7, other_states @ other_weight.T / 0.7
    reverse, forward = kl_full(logits, other_logits), kl_full(other_logits, logits)
    own = {"reverse": reverse, "forward": forward, "jsd": jsd(logits, other_logits, 0.2)}[divergence.kind]

    other = DivergenceTarget(LmHeadInput(other_states, LmHead(other_weight)), divergence, with_statistics=True)
    policy = LmHeadInput(hidden, LmHead(weight, bias))
    stats = compute_token_stats(policy, targets, 0.7, divergence_target=other, limits=limits)
    assert stats.divergence is not None and stats.agreement is not None and not stats.agreement.requires_grad
    assert_same(stats.divergence, own, (hidden, weight, bias))
    torch.testing.assert_close(stats.reverse_kl, reverse.detach())
    torch.testing.assert_close(stats.forward_kl, forward.detach())
    common = torch.minimum(logits.softmax(-1), other_logits.softmax(-1)).sum(-1)
    torch.testing.assert_close(stats.agreement, common.detach())


def test_only_a_chunk_of_logits_exists_at_a_time(monkeypatch: pytest.MonkeyPatch):
    sizes = []
    linear = head_module.linear

    def recording(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        result = linear(x, weight)
        if result.shape[-1] == VOCABULARY:
            sizes.append(result.shape[0])
        return result

    monkeypatch.setattr(head_module, "linear", recording)
    hidden, weight, _, targets, *_ = inputs(torch.float32)
    stats = compute_token_stats(
        LmHeadInput(hidden, LmHead(weight)), targets, 1.0, limits=LogitLimits(3 * VOCABULARY, 3 * VOCABULARY)
    )
    stats.logprobs.sum().backward()
    assert sizes == [3, 3, 1, 3, 3, 1]  # forward, and again backward


def test_logits_of_a_single_block_are_computed_once_and_replaced_by_their_gradient():
    """A graph can be used once then, as in training."""
    results = []
    for limits in (LogitLimits(100 * VOCABULARY, 2 * VOCABULARY), LogitLimits(2 * VOCABULARY, 2 * VOCABULARY)):
        hidden, weight, bias, targets, *_ = inputs()
        head = LmHeadInput(hidden, LmHead(weight, bias, softcap=2.0))
        stats = compute_token_stats(head, targets, 0.7, needs_entropy=True, limits=limits)
        assert stats.entropy is not None
        results.append(torch.autograd.grad((stats.logprobs + stats.entropy).square().sum(), (hidden, weight, bias)))
    torch.testing.assert_close(*results)


def test_bfloat16_head_computes_in_float32():
    hidden, weight, _, targets, *_ = inputs(torch.bfloat16)
    stats = compute_token_stats(
        LmHeadInput(hidden, LmHead(weight)), targets, 1.0, limits=LogitLimits(2 * VOCABULARY, 2 * VOCABULARY)
    )
    assert stats.logprobs.dtype is torch.float32
    stats.logprobs.sum().backward()
    assert weight.grad is not None and weight.grad.dtype is torch.bfloat16


@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (1.3, 2.0)])
def test_the_fused_head_equals_the_separate_operations(
    monkeypatch: pytest.MonkeyPatch, scale: float, softcap: float | None
):
    """Traced as on a GPU, but without generated code (backend="eager"), so that no compiler is needed."""
    traced = []

    def trace(function):
        traced.append(function.__name__)
        return torch.compile(function, backend="eager", dynamic=True)

    monkeypatch.setattr(head_module, "_compile", trace)
    results = []
    for fused in (False, True):
        hidden, weight, bias, targets, *_ = inputs()
        head = LmHeadInput(hidden, LmHead(weight, bias, scale, softcap))
        stats = compute_token_stats(
            head, targets, 0.7, needs_entropy=True, limits=LogitLimits(2 * VOCABULARY, 2 * VOCABULARY), fused=fused
        )
        loss = (torch.linspace(-1, 1, NUM_TOKENS) * (stats.logprobs + 0.3 * stats.entropy)).sum()
        results.append((stats.logprobs, stats.entropy, *torch.autograd.grad(loss, (hidden, weight, bias))))
    assert traced == ["compute_chunk_stats", "compute_logit_gradient"]
    torch.testing.assert_close(results[1], results[0])


def sets_with(targets: torch.Tensor) -> list[list[int]]:
    """Kept tokens of each token, which contain its target; none for the first token, which could be any."""
    generator = torch.Generator().manual_seed(4)
    masks = torch.rand(NUM_TOKENS, VOCABULARY, generator=generator) < 0.4
    masks[torch.arange(NUM_TOKENS), targets] = True
    return [[], *(mask.nonzero()[:, 0].tolist() for mask in masks[1:])]


def kept_logits(sets: list[list[int]]) -> KeptLogits:
    offsets = torch.tensor([0, *(len(one) for one in sets)]).cumsum(0)
    return KeptLogits(offsets, torch.tensor([token for one in sets for token in one], dtype=torch.int32))


@pytest.mark.parametrize("limits", [LogitLimits(1, 1), *LIMITS])
@pytest.mark.parametrize("kind", ["log-probs", "all", "softcap", "fused"])
def test_kept_tokens_equal_the_enumerated_distribution(limits: LogitLimits, kind: str, monkeypatch: pytest.MonkeyPatch):
    """Log-prob and entropy are those of the softmax over the kept tokens, the divergence that of all tokens."""
    monkeypatch.setattr(head_module, "_compile", partial(torch.compile, backend="eager", dynamic=True))
    hidden, weight, _, targets, other_states, other_weight = inputs()
    cap, leaves = 2.0 if kind == "softcap" else None, (hidden, weight)
    temperature = 1.0 if kind == "all" else 0.7  # with 1.0, the logits are not copied
    head, sets = LmHead(weight, softcap=cap, num_tokens=10), sets_with(targets := targets % 10)
    other = DivergenceTarget(LmHeadInput(other_states, LmHead(other_weight[:10])), REVERSE)
    target = None if kind in ("log-probs", "fused") else other
    options = {"limits": limits, "kept": kept_logits(sets), "fused": kind == "fused"}
    stats = compute_token_stats(LmHeadInput(hidden, head), targets, temperature, kind != "log-probs", target, **options)
    logits = hidden @ weight[:10].T
    logits = (cap * torch.tanh(logits / cap) if cap else logits) / temperature
    logprobs, entropies = [], []
    for one, kept, token in zip(logits, sets, targets.tolist(), strict=True):
        ids = [token for token in kept if token < 10] or [*range(10)]  # row 10 of the weight is padding
        p = one[ids].exp() / one[ids].exp().sum()
        logprobs.append(p[ids.index(token)].log())
        entropies.append(-(p * p.log()).sum())
    assert_same(stats.logprobs, torch.stack(logprobs), leaves)
    if kind != "log-probs":
        assert_same(stats.logprobs + stats.entropy, torch.stack(logprobs) + torch.stack(entropies), leaves)
    if target is not None:
        expected = kl_full(logits, other_states @ other_weight[:10].T / temperature)
        mixed = stats.logprobs + 0.3 * stats.entropy + 0.2 * stats.divergence
        assert_same(mixed, torch.stack(logprobs) + 0.3 * torch.stack(entropies) + 0.2 * expected, leaves)
