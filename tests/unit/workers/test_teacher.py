"""Log-probs and divergences of a teacher equal those of plain models. test_layouts.py has all layouts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from alphaapollo.config.schema.reward import TEACHER_SHARES
from tests.unit.plain import jsd, kl_full
from tests.unit.tiny import save_tokenizer
from tests.unit.workers import training
from tests.unit.workers.layouts import compute_alone
from tests.unit.workers.roles import ROLES


def wider(folder: str, out: Path) -> str:
    """Model with eight more rows in its head, as larger models of a family have."""
    model = training.load_plain(folder)
    model.resize_token_embeddings(model.config.vocab_size + 8)
    model.save_pretrained(out)
    save_tokenizer(out)
    return str(out)


@pytest.mark.parametrize("kind", ["reverse", "forward", "jsd"])
def test_divergences_of_several_teachers_equal_those_of_plain_logits(locate, tmp_path: Path, kind: str):
    """The head of one teacher is wider than the policy's."""
    case = locate(replace(ROLES["teachers by row"], no_advantages=True))
    models = case.teacher["models"]
    models["first"] = {"path": wider(models["first"]["path"], tmp_path)}
    case.teacher["divergence"] = kind
    ours = compute_alone(case)
    policy = training.load_plain(case.folder, 1.1)
    teachers = [training.load_plain(model["path"]) for model in models.values()]
    rows, terms = training.make_batch(case).rank_batches[0].rows, []
    for (ids, start, _, mask), shares in zip(training.iterate_rows(rows), rows.columns[TEACHER_SHARES], strict=True):
        p, *others = (model(ids[None]).logits[0, start - 1 : -1, :48][mask] / 0.9 for model in (policy, *teachers))
        for_each = ((share, other.detach()) for share, other in zip(shares, others, strict=True))
        compute = {"reverse": kl_full, "forward": lambda p, q: kl_full(q, p), "jsd": lambda p, q: jsd(p, q, 0.3)}[kind]
        terms.append(sum(share * compute(p, q) for share, q in for_each))
    total = 0.7 * torch.cat(terms).mean()
    total.backward()
    assert ours.metrics["distill/divergence"] == pytest.approx(torch.cat(terms).mean().item(), rel=1e-5)
    assert ours.metrics["actor/loss"] == pytest.approx(total.item(), rel=1e-5)
    training.assert_close(ours.gradients, training.gradients_of(policy), atol=2e-6, rtol=1e-3)


def test_log_probs_of_teachers_are_mixed_with_the_weights_of_each_row(start, model_folder):
    """The first teacher's are those of the plain model."""
    case = ROLES["teachers by row"]
    sampled = {"divergence": "sampled"}
    cases = [replace(case, teacher=case.teacher | sampled)]
    cases += [replace(case, teacher=sampled, teacher_folder=name, teacher_shares=()) for name in ("llama", "qwen2")]
    workers = [start(one)[0] for one in cases]
    mixed, first, second = (worker.compute_log_probs("teacher") for worker in workers)
    rows = workers[0].batch.rows
    plain = training.load_plain(model_folder("llama"))
    expected = [training.plain_logprobs(plain, ids)[start - 1 :] for ids, start, *_ in training.iterate_rows(rows)]
    np.testing.assert_allclose(first, torch.cat(expected).numpy(), atol=1e-5)
    weights = np.repeat(rows.columns[TEACHER_SHARES], rows.response_lengths, axis=0)
    np.testing.assert_allclose(mixed, weights[:, 0] * first + weights[:, 1] * second, atol=1e-5)
