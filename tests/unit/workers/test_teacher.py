"""Log-probs and divergences of a teacher equal those of plain models in any layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from alphaapollo.batching.batch import RankBatch
from alphaapollo.config.schema.reward import TEACHER_SHARES
from tests.unit.plain import jsd, kl_full
from tests.unit.tiny import run_ranks, save_tokenizer
from tests.unit.workers import training
from tests.unit.workers.training import Case

JSD = {"divergence": "jsd", "beta": 0.3, "coef": 0.7}


def wider(folder: Path, out: Path) -> str:
    """Model with eight more rows in its head, as larger models of a family have."""
    model = training.load_plain(folder)
    model.resize_token_embeddings(model.config.vocab_size + 8)
    model.save_pretrained(out)
    save_tokenizer(out)
    return str(out)


def two_teachers(model_folder, divergence: str, first: str = "") -> Case:
    """Rows of the first teacher, of the second one, and of both."""
    folders = {"first": first or str(model_folder("llama")), "second": str(model_folder("qwen2"))}
    models = {name: {"path": folder} for name, folder in folders.items()}
    teacher = JSD | {"divergence": divergence, "models": models, "by_source": {"*": "first"}}
    weights = ((1.0, 0.0), (0.0, 1.0), (0.25, 0.75))
    return Case(str(model_folder("qwen3")), teacher=teacher, teacher_shares=weights, max_tokens=40)


@pytest.mark.parametrize("num_teachers", [1, 2])
def test_same_gradients_in_any_layout(model_folder, num_teachers: int):
    """Micro-batches, packed rows, checkpointing, two ranks, a rank without rows, and sequence parallelism."""
    case = Case(str(model_folder("qwen3")), teacher=JSD, teacher_folder=str(model_folder("llama")))
    case = case if num_teachers == 1 else two_teachers(model_folder, "jsd")
    assert training.alone(case)[1]["distill/divergence"] > 0.01
    training.check_layouts_compute_the_same(case)


@pytest.mark.parametrize("kind", ["reverse", "forward", "jsd"])
def test_divergences_of_several_teachers_equal_those_of_plain_logits(model_folder, tmp_path: Path, kind: str):
    """The head of one teacher is wider than the policy's."""
    first = wider(model_folder("llama"), tmp_path)
    case = replace(two_teachers(model_folder, kind, first), no_advantages=True)
    ours, metrics = training.alone(case)
    policy = training.load_plain(case.folder, 1.1)
    teachers = [training.load_plain(model["path"]) for model in case.teacher["models"].values()]
    rows, terms = training.make_batch(case, 1).rank_batches[0].rows, []
    for (ids, start, _, mask), shares in zip(training.iterate_rows(rows), rows.columns[TEACHER_SHARES], strict=True):
        p, *others = (model(ids[None]).logits[0, start - 1 : -1, :48][mask] / 0.9 for model in (policy, *teachers))
        for_each = ((share, other.detach()) for share, other in zip(shares, others, strict=True))
        compute = {"reverse": kl_full, "forward": lambda p, q: kl_full(q, p), "jsd": lambda p, q: jsd(p, q, 0.3)}[kind]
        terms.append(sum(share * compute(p, q) for share, q in for_each))
    total = 0.7 * torch.cat(terms).mean()
    total.backward()
    assert metrics["distill/divergence"] == pytest.approx(torch.cat(terms).mean().item(), rel=1e-5)
    assert metrics["actor/loss"] == pytest.approx(total.item(), rel=1e-5)
    training.assert_close(ours, training.gradients_of(policy), atol=2e-6, rtol=1e-3)


def test_teacher_log_probs_equal_those_of_the_plain_model(model_folder):
    folder = str(model_folder("llama"))
    case = Case(str(model_folder("qwen3")), teacher={"divergence": "sampled"}, teacher_folder=folder)
    batch, plain = training.make_batch(case, 1).rank_batches[0], training.load_plain(folder)
    expected = torch.cat(
        [training.plain_logprobs(plain, ids)[start - 1 :] for ids, start, *_ in training.iterate_rows(batch.rows)]
    )
    column = teacher_column(0, 1, "", case, batch)
    np.testing.assert_allclose(column, expected.numpy(), atol=1e-5)
    shared = replace(case, sequence_parallel=2, attention="sdpa")
    for own in run_ranks(teacher_column, 2, shared, batch):  # whole on each of two that share every sequence
        np.testing.assert_allclose(own, column, atol=1e-5)


def test_top_tokens_of_a_server_equal_those_of_the_same_model_on_the_ranks(model_folder):
    """Also with a rank without rows, and with sequence parallelism."""
    folder = str(model_folder("llama"))
    server, local = {"base_url": "http://127.0.0.1:9/v1", "name": "big"}, {"path": folder}
    case = Case(str(model_folder("qwen3")), teacher=JSD | {"top_k": 5, "model": local}, max_tokens=40)
    served = replace(case, teacher=case.teacher | {"model": server}, server_folder=folder)
    cases = [replace(served, num_rows=1), replace(served, sequence_parallel=2, attention="sdpa")]
    ranks = run_ranks(training.call_for_each, 2, training.gradients, cases, timeout=200)
    for index, rows in enumerate((1, case.num_rows)):
        expected, metrics = training.alone(replace(case, num_rows=rows))
        for rank in ranks:
            ours, own_figures = rank[index]
            np.testing.assert_allclose(own_figures["distill/divergence"], metrics["distill/divergence"], rtol=1e-4)
            training.assert_close(ours, expected, atol=1e-5, rtol=1e-3)


def test_log_probs_of_several_teachers_are_mixed_with_the_weights_of_each_row(model_folder):
    case = two_teachers(model_folder, "sampled")
    rows = training.make_batch(case, 1).rank_batches[0].rows
    single = [
        replace(case, teacher={"divergence": "sampled", "model": model}, teacher_shares=())
        for model in case.teacher["models"].values()
    ]
    mixed, *single = (
        teacher_column(0, 1, "", one, training.make_batch(one, 1).rank_batches[0]) for one in (case, *single)
    )
    weights = np.repeat(rows.columns[TEACHER_SHARES], rows.response_lengths, axis=0)
    np.testing.assert_allclose(mixed, weights[:, 0] * single[0] + weights[:, 1] * single[1], atol=1e-5)


def teacher_column(rank: int, num_ranks: int, address: str, case: Case, batch: RankBatch) -> np.ndarray:
    worker = training.make_worker(case, rank, num_ranks, address)
    worker.load_batch(batch)
    column = worker.compute_log_probs("teacher")
    worker.close()
    return column
