"""A self-teacher's divergences and gradients equal those of plain models in any layout, and its weights are resumed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from alphaapollo.config.resolve import resolve_model
from alphaapollo.models.float64_mode import Float64Mode
from alphaapollo.models.sharding import local_tensor
from tests.unit.plain import jsd, kl_full
from tests.unit.tiny import free_address, run_ranks
from tests.unit.workers import training
from tests.unit.workers.test_policy_gradients import alone, assert_same
from tests.unit.workers.training import Case, gradients_of_cases, make_batch, make_columns, make_worker

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
def test_equals_plain_models_in_float64(model_folder, monkeypatch: pytest.MonkeyPatch, kind: str, top_k: int | None):
    """The teacher has the initial weights and reads other prompts. Token-mean over the rows with a context."""
    from transformers import AutoModelForCausalLM

    folder = model_folder("qwen3")
    case = case_of(folder, top_k=top_k, max_ratio=1.01)
    case = replace(case, teacher=case.teacher | {"divergence": kind}, no_advantages=True)
    double = {"dtype": "float64"}
    monkeypatch.setattr(training, "resolve_model", lambda *words: resolve_model(*words).model_copy(update=double))
    with Float64Mode():
        ours, metrics = alone(case)
        policy, teacher = (AutoModelForCausalLM.from_pretrained(folder).double().eval() for _ in range(2))
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(1.1)
        batch = make_batch(case, 1)
        rows, old, terms, weights = batch.rank_batches[0].rows, make_columns(case, batch, 0).old_logprobs, [], []
        assert rows.teacher_prompts is not None
        for row, prompt in enumerate(rows.teacher_prompts):
            if not prompt:
                continue
            ids = torch.from_numpy(rows.token_ids[rows.token_offsets[row] : rows.token_offsets[row + 1]]).long()
            start, part = int(rows.response_starts[row]), slice(*rows.response_offsets[row : row + 2])
            mask = torch.from_numpy(rows.action_mask[part]).bool()
            longer = torch.cat([torch.tensor(list(prompt)), ids[start:]])
            logits = policy(ids[None]).logits[0, start - 1 : -1][mask] / 0.9
            others = teacher(longer[None]).logits[0, len(prompt) - 1 : -1][mask].detach() / 0.9
            p, q = (logits, others) if top_k is None else join_least_likely(logits, others, top_k)
            terms.append({"reverse": kl_full(p, q), "forward": kl_full(q, p), "jsd": jsd(p, q, 0.3)}[kind])
            logp = logits.detach().log_softmax(-1).gather(-1, ids[start:][mask][:, None])[:, 0]
            weights.append((logp - torch.tensor(old[part]).double()[mask]).exp().clamp(max=1.01))
        assert 2 < len(terms) < len(rows)
        total = 0.7 * (torch.cat(terms) * torch.cat(weights)).mean()
        total.backward()
    assert metrics["actor/loss"] == pytest.approx(total.item(), rel=1e-7)  # loss weights are float32
    assert metrics["distill/divergence"] == pytest.approx(torch.cat(terms).mean().item(), rel=1e-9)
    for name, parameter in policy.named_parameters():
        assert parameter.grad is not None
        np.testing.assert_allclose(ours[f"model.{name}"], parameter.grad.numpy(), rtol=1e-6, atol=1e-9)


@pytest.mark.timeout(240)
def test_same_gradients_in_any_layout(model_folder):
    """Micro-batches, packed rows, checkpointing, two ranks, a rank without rows, and sequence parallelism."""
    case = case_of(model_folder("qwen3"), top_k=5)
    expected, metrics = alone(case)
    assert metrics["distill/divergence"] > 0.01
    for other in (replace(case, max_tokens=40, checkpointing=True), replace(case, attention="sdpa", max_tokens=60)):
        ours, own_metrics = alone(other)
        assert_same(ours, expected)
        assert own_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-6)
    shared = replace(case, max_tokens=40, sequence_parallel=2)
    cases = [replace(case, max_tokens=40), replace(case, num_rows=1), shared, replace(shared, attention="sdpa")]
    ranks = run_ranks(gradients_of_cases, 2, cases, [free_address() for _ in cases], timeout=200)
    for index, one in enumerate(cases):
        expected, metrics = alone(replace(one, sequence_parallel=1))
        for rank in ranks:
            assert_same(rank[index][0], expected)
            assert rank[index][1] == pytest.approx(metrics, rel=1e-5, abs=1e-6)


def weights_of(model: torch.nn.Module) -> list[np.ndarray]:
    return [local_tensor(parameter).detach().numpy().copy() for parameter in model.parameters()]


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_follows_the_policy_and_resumes_bitwise(model_folder, tmp_path: Path, lora_rank: int):
    case = replace(case_of(model_folder("qwen3"), ema_rate=0.25), lora_rank=lora_rank)
    actor = {"optim": {"lr": 1e-2}}
    batch = make_batch(case, 1)
    columns = make_columns(case, batch, 0)

    def build() -> training.PolicyWorker:
        worker = make_worker(replace(case, actor=actor), 0, 1, free_address())
        worker.load_batch(batch.rank_batches[0])
        return worker

    worker = build()
    before = weights_of(worker.policy)
    worker.update(columns)
    for own, first, now in zip(weights_of(worker.self_teacher.model), before, weights_of(worker.policy), strict=True):
        np.testing.assert_allclose(own, 0.75 * first + 0.25 * now, rtol=1e-6, atol=1e-8)
    worker.save(str(tmp_path))
    worker.get_save_future().result()
    metrics = worker.update(columns)
    expected = weights_of(worker.policy), weights_of(worker.self_teacher.model)
    worker.close()

    resumed = build()
    resumed.load(str(tmp_path))
    again = resumed.update(columns)
    assert again == metrics
    for ours, theirs in zip((resumed.policy, resumed.self_teacher.model), expected, strict=True):
        assert all(np.array_equal(x, y) for x, y in zip(weights_of(ours), theirs, strict=True))
    resumed.close()


def test_starts_from_the_policy_if_the_checkpoint_has_no_teacher(model_folder, tmp_path: Path):
    plain = Case(str(model_folder("qwen3")), actor={"optim": {"lr": 1e-2}})
    batch = make_batch(plain, 1)
    worker = make_worker(plain, 0, 1, free_address())
    worker.load_batch(batch.rank_batches[0])
    worker.update(make_columns(plain, batch, 0))
    worker.save(str(tmp_path))
    worker.get_save_future().result()
    worker.close()
    worker = make_worker(case_of(model_folder("qwen3")), 0, 1, free_address())
    worker.load(str(tmp_path))
    for own, policy in zip(weights_of(worker.self_teacher.model), weights_of(worker.policy), strict=True):
        np.testing.assert_array_equal(own, policy)
    worker.close()
