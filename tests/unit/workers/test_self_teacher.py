"""A self-teacher's divergences and gradients equal those of plain models, and its weights follow the policy's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from alphaapollo.models.sharding import local_tensor
from alphaapollo.trainer.replay.run import Float64Mode
from alphaapollo.types import LONGER_PROMPT
from tests.unit.plain import jsd, kl_full
from tests.unit.workers import training
from tests.unit.workers.layouts import compute_alone
from tests.unit.workers.training import Case

JSD = {"divergence": "jsd", "beta": 0.3, "coef": 0.7}
SELF = {"context": "feedback"}


def case_of(folder: Path, top_k: int | None = None, **settings: object) -> Case:
    return Case(str(folder), teacher=JSD | {"top_k": top_k, "self_teacher": SELF | settings}, contexts=True)


def join_least_likely(logits: torch.Tensor, other: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the k most likely tokens of `logits`, and of all others together, in both distributions."""
    p, q = logits.softmax(-1), other.softmax(-1)
    top = p.topk(k).indices
    events = [torch.cat([x.gather(-1, top), 1 - x.gather(-1, top).sum(-1, keepdim=True)], -1) for x in (p, q)]
    return events[0].log(), events[1].log()


@pytest.mark.parametrize(("kind", "top_k"), [("reverse", 5), ("forward", None), ("jsd", 5)])
def test_equals_plain_models_in_float64(model_folder, kind: str, top_k: int | None):
    """The teacher has the initial weights and reads other prompts. Token-mean over the rows with a context."""
    folder = model_folder("qwen3")
    case = case_of(folder, top_k=top_k, max_ratio=1.01)
    case = replace(case, teacher=case.teacher | {"divergence": kind}, no_advantages=True, dtype="float64")
    with Float64Mode():
        ours = compute_alone(case)
        policy, teacher = (training.load_plain(folder).double() for _ in range(2))
        training.scale_weights(policy, 1.1)
        batch = training.make_batch(case)
        rows, old = batch.rank_batches[0].rows, training.make_columns(case, batch).old_logprobs
        terms, weights = [], []
        for (ids, start, part, mask), prompt in zip(
            training.iterate_rows(rows), rows.columns[LONGER_PROMPT], strict=True
        ):
            if not prompt:
                continue
            longer = torch.cat([torch.tensor(list(prompt)), ids[start:].long()])
            logits = policy(ids[None].long()).logits[0, start - 1 : -1][mask] / 0.9
            others = teacher(longer[None]).logits[0, len(prompt) - 1 : -1][mask].detach() / 0.9
            p, q = (logits, others) if top_k is None else join_least_likely(logits, others, top_k)
            terms.append({"reverse": kl_full(p, q), "forward": kl_full(q, p), "jsd": jsd(p, q, 0.3)}[kind])
            logp = logits.detach().log_softmax(-1).gather(-1, ids[start:][mask][:, None].long())[:, 0]
            weights.append((logp - torch.tensor(old[part]).double()[mask]).exp().clamp(max=1.01))
        assert 2 < len(terms) < len(rows)
        total = 0.7 * (torch.cat(terms) * torch.cat(weights)).mean()
        total.backward()
    assert ours.metrics["actor/loss"] == pytest.approx(total.item(), rel=1e-7)  # loss weights are float32
    assert ours.metrics["distill/divergence"] == pytest.approx(torch.cat(terms).mean().item(), rel=1e-9)
    training.assert_close(ours.gradients, training.gradients_of(policy), atol=1e-9, rtol=1e-6)


def weights_of(model: torch.nn.Module) -> list[np.ndarray]:
    return [local_tensor(parameter).detach().numpy().copy() for parameter in model.parameters()]


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_follows_the_policy(start, model_folder, lora_rank: int):
    case = replace(case_of(model_folder("qwen3"), ema_rate=0.25), lora_rank=lora_rank, actor={"optim": {"lr": 1e-2}})
    worker, columns = start(case)
    before = weights_of(worker.policy)
    worker.update(columns)
    teacher, policy = weights_of(worker.find("teacher").model), weights_of(worker.policy)
    for own, first, now in zip(teacher, before, policy, strict=True):
        np.testing.assert_allclose(own, 0.75 * first + 0.25 * now, rtol=1e-6, atol=1e-8)


def test_starts_from_the_policy_if_the_checkpoint_has_no_teacher(start, model_folder, tmp_path: Path):
    worker, columns = start(actor={"optim": {"lr": 1e-2}})
    worker.update(columns)
    worker.save(str(tmp_path))
    worker.get_save_future().result()
    worker, _ = start(case_of(model_folder("qwen3")))
    worker.load(str(tmp_path))
    for own, policy in zip(weights_of(worker.find("teacher").model), weights_of(worker.policy), strict=True):
        np.testing.assert_array_equal(own, policy)
