"""The policy's loss and gradients equal the explicit formula on plain logits."""

from __future__ import annotations

import pytest
import torch

from alphaapollo.config.schema import Actor
from tests.unit.plain import entropy, kl_full
from tests.unit.workers import training
from tests.unit.workers.layouts import compute_alone
from tests.unit.workers.training import Case


@pytest.mark.parametrize("name", ["qwen3", "llama", "qwen3_moe"])
def test_equals_the_explicit_loss_on_plain_logits(locate, name: str):
    """PPO's clip, full KL and entropy, token-mean, row by row through the plain Hugging Face model."""
    settings = {"entropy_coeff": 0.1, "use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": "full"}
    case = locate(Case(name, settings, needs_reference=True))
    ours = compute_alone(case)
    policy, reference = training.load_plain(case.folder, 1.1), training.load_plain(case.folder)
    batch = training.make_batch(case)
    rows, columns = batch.rank_batches[0].rows, training.make_columns(case, batch)
    assert columns.advantages is not None and columns.old_logprobs is not None
    actor, terms = Actor(**settings), []
    for ids, start, part, mask in training.iterate_rows(rows):
        logits = policy(ids[None]).logits[0, start - 1 : -1] / 0.9
        ref_logits = reference(ids[None]).logits[0, start - 1 : -1].detach() / 0.9
        logp = logits.log_softmax(-1).gather(1, ids[start:, None])[:, 0]
        ratio = (logp - torch.from_numpy(columns.old_logprobs[part].copy())).exp()
        advantages = torch.from_numpy(columns.advantages[part].copy())
        loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        loss = loss + actor.kl_loss_coef * kl_full(logits, ref_logits) - actor.entropy_coeff * entropy(logits)
        terms.append(loss[mask])
    total = torch.cat(terms).mean()
    total.backward()
    assert ours.metrics["actor/loss"] == pytest.approx(total.item(), rel=1e-5)
    training.assert_close(ours.gradients, training.gradients_of(policy), atol=2e-6, rtol=1e-3)
