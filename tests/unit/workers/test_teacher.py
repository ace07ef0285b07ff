"""Log-probs and divergences of a teacher equal those of plain models in any layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from alphaapollo.data.batch import RankBatch
from tests.unit.plain import jsd, kl_full
from tests.unit.tiny import free_address, run_ranks
from tests.unit.workers.test_policy_gradients import alone, assert_same
from tests.unit.workers.training import Case, gradients_of_cases, make_batch, make_worker

JSD = {"divergence": "jsd", "beta": 0.3, "coef": 0.7}


def wider(folder: Path, out: Path) -> str:
    """Model with eight more rows in its head, as larger models of a family have."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(model.config.vocab_size + 8)
    model.save_pretrained(out)
    return str(out)


def test_same_gradients_in_any_layout(model_folder):
    case = Case(str(model_folder("qwen3")), teacher=JSD, teacher_folder=str(model_folder("llama")))
    expected, metrics = alone(case)
    assert metrics["distill/divergence"] > 0.01
    for other in (replace(case, max_tokens=40, checkpointing=True), replace(case, attention="sdpa", max_tokens=60)):
        ours, own_figures = alone(other)
        assert_same(ours, expected)
        assert own_figures == pytest.approx(metrics, rel=1e-5, abs=1e-6)


@pytest.mark.timeout(240)
def test_same_gradients_on_two_ranks(model_folder):
    """Also with a rank without rows, and with sequence parallelism: padded, and packed."""
    case = Case(str(model_folder("qwen3")), teacher=JSD, teacher_folder=str(model_folder("llama")), max_tokens=40)
    shared = replace(case, sequence_parallel=2)
    cases = [case, replace(case, num_rows=1), shared, replace(shared, attention="sdpa")]
    ranks = run_ranks(gradients_of_cases, 2, cases, [free_address() for _ in cases], timeout=200)
    for index, one in enumerate(cases):
        expected, metrics = alone(replace(one, sequence_parallel=1))
        for rank in ranks:
            ours, own_figures = rank[index]
            assert_same(ours, expected)
            assert own_figures == pytest.approx(metrics, rel=1e-5, abs=1e-6)


def two_teachers(model_folder, divergence: str) -> Case:
    """Rows of the first teacher, of the second one, and of both."""
    folders = {"first": str(model_folder("llama")), "second": str(model_folder("qwen2"))}
    models = {name: {"path": folder} for name, folder in folders.items()}
    teacher = {"divergence": divergence, "models": models, "by_source": {"*": "first"}, "coef": 0.7}
    weights = ((1.0, 0.0), (0.0, 1.0), (0.25, 0.75))
    return Case(str(model_folder("qwen3")), teacher=teacher, teacher_shares=weights, max_tokens=40)


@pytest.mark.timeout(240)
def test_several_teachers_equal_plain_logits_and_are_the_same_on_two_ranks(model_folder):
    from transformers import AutoModelForCausalLM

    case = replace(two_teachers(model_folder, "jsd"), no_advantages=True)
    ours, metrics = alone(case)
    paths = [case.folder, *(model["path"] for model in case.teacher["models"].values())]
    policy, *teachers = (AutoModelForCausalLM.from_pretrained(path).eval() for path in paths)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.1)
    rows, terms = make_batch(case, 1).rank_batches[0].rows, []
    for row in range(len(rows)):
        ids = torch.from_numpy(rows.token_ids[rows.token_offsets[row] : rows.token_offsets[row + 1]])
        start, part = int(rows.response_starts[row]), slice(*rows.response_offsets[row : row + 2])
        mask = torch.from_numpy(rows.action_mask[part]).bool()
        logits, *others = (model(ids[None]).logits[0, start - 1 : -1][mask] / 0.9 for model in (policy, *teachers))
        weights = zip(rows.teacher_shares[row].tolist(), others, strict=True)
        terms.append(sum(weight * jsd(logits, other.detach(), 0.5) for weight, other in weights))
    total = 0.7 * torch.cat(terms).mean()
    total.backward()
    assert metrics["actor/loss"] == pytest.approx(total.item(), rel=1e-5)
    for name, parameter in policy.named_parameters():
        np.testing.assert_allclose(ours[f"model.{name}"], parameter.grad.numpy(), atol=2e-6, rtol=1e-3)
    shared = replace(case, sequence_parallel=2, attention="sdpa")
    cases = [replace(case, num_rows=1), shared]
    ranks = run_ranks(gradients_of_cases, 2, cases, [free_address() for _ in cases], timeout=200)
    for index, one in enumerate(cases):
        expected, _ = alone(replace(one, sequence_parallel=1))
        for rank in ranks:
            assert_same(rank[index][0], expected)


@pytest.mark.parametrize("kind", ["reverse", "forward", "jsd"])
def test_equals_the_explicit_divergence_on_plain_logits(model_folder, tmp_path: Path, kind: str):
    """Token-mean, row by row through the plain Hugging Face models; the teacher's head is wider than the policy's."""
    from transformers import AutoModelForCausalLM

    folder = str(model_folder("qwen3"))
    case = Case(folder, teacher=JSD | {"divergence": kind}, teacher_folder=wider(model_folder("llama"), tmp_path))
    case = replace(case, no_advantages=True)
    ours, metrics = alone(case)

    policy, teacher = (AutoModelForCausalLM.from_pretrained(one).eval() for one in (folder, case.teacher_folder))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.1)
    rows, terms, reverse, forward, shared = make_batch(case, 1).rank_batches[0].rows, [], [], [], []
    for row in range(len(rows)):
        ids = torch.from_numpy(rows.token_ids[rows.token_offsets[row] : rows.token_offsets[row + 1]])
        start, part = int(rows.response_starts[row]), slice(*rows.response_offsets[row : row + 2])
        mask = torch.from_numpy(rows.action_mask[part]).bool()
        logits = policy(ids[None]).logits[0, start - 1 : -1][mask] / 0.9
        others = teacher(ids[None]).logits[0, start - 1 : -1, : logits.shape[-1]][mask].detach() / 0.9
        reverse.append(kl_full(logits, others))
        forward.append(kl_full(others, logits))
        terms.append({"reverse": reverse[-1], "forward": forward[-1], "jsd": jsd(logits, others, 0.3)}[kind])
        shared.append(torch.minimum(logits.softmax(-1), others.softmax(-1)).sum(-1))
    total = 0.7 * torch.cat(terms).mean()
    total.backward()
    assert metrics["actor/loss"] == pytest.approx(total.item(), rel=1e-5)
    told = {"divergence": terms, "reverse_kl": reverse, "forward_kl": forward, "agreement": shared}
    for name, values in told.items():
        assert metrics[f"distill/{name}"] == pytest.approx(torch.cat(values).mean().item(), rel=1e-5)
    for name, parameter in policy.named_parameters():
        assert parameter.grad is not None
        np.testing.assert_allclose(ours[f"model.{name}"], parameter.grad.numpy(), atol=2e-6, rtol=1e-3)


def test_teacher_log_probs_equal_those_of_the_plain_model(model_folder):
    from transformers import AutoModelForCausalLM

    folder = str(model_folder("llama"))
    case = Case(str(model_folder("qwen3")), teacher={"divergence": "sampled"}, teacher_folder=folder)
    worker = make_worker(case, 0, 1, free_address())
    batch = make_batch(case, 1).rank_batches[0]
    plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    rows, expected = batch.rows, []
    for row in range(len(rows)):
        ids = torch.from_numpy(rows.token_ids[rows.token_offsets[row] : rows.token_offsets[row + 1]])
        start = int(rows.response_starts[row])
        with torch.no_grad():
            logp = (plain(ids[None]).logits[0, start - 1 : -1] / 0.9).log_softmax(-1)
        expected.append(logp.gather(1, ids[start:, None])[:, 0])
    worker.load_batch(batch)
    column = worker.compute_teacher_log_probs()
    worker.close()
    np.testing.assert_allclose(column, torch.cat(expected).numpy(), atol=1e-5)
    shared = replace(case, sequence_parallel=2, attention="sdpa")
    for own in run_ranks(teacher_column, 2, shared, batch):  # whole on each of two that share every sequence
        np.testing.assert_allclose(own, column, atol=1e-5)


@pytest.mark.timeout(240)
def test_top_tokens_of_a_server_equal_those_of_the_same_model_on_the_ranks(model_folder):
    """Also with a rank without rows, and with sequence parallelism."""
    folder = str(model_folder("llama"))
    server, local = {"base_url": "http://127.0.0.1:9/v1", "name": "big"}, {"path": folder}
    case = Case(str(model_folder("qwen3")), teacher=JSD | {"top_k": 5, "model": local}, max_tokens=40)
    served = replace(case, teacher=case.teacher | {"model": server}, server_folder=folder)
    cases = [replace(served, num_rows=1), replace(served, sequence_parallel=2, attention="sdpa")]
    ranks = run_ranks(gradients_of_cases, 2, cases, [free_address() for _ in cases], timeout=200)
    for index, rows in enumerate((1, case.num_rows)):
        expected, metrics = alone(replace(case, num_rows=rows))
        for rank in ranks:
            ours, own_figures = rank[index]
            np.testing.assert_allclose(own_figures["distill/divergence"], metrics["distill/divergence"], rtol=1e-4)
            for name, gradient in expected.items():
                np.testing.assert_allclose(ours[name], gradient, atol=1e-5, rtol=1e-3)


def test_log_probs_of_several_teachers_are_mixed_with_the_weights_of_each_row(model_folder):
    case = two_teachers(model_folder, "sampled")
    rows = make_batch(case, 1).rank_batches[0].rows
    mixed, *single = (
        teacher_column(0, 1, free_address(), one, make_batch(one, 1).rank_batches[0])
        for one in (
            case,
            *(
                replace(case, teacher={"divergence": "sampled", "model": model}, teacher_shares=())
                for model in case.teacher["models"].values()
            ),
        )
    )
    weights = np.repeat(rows.teacher_shares, rows.response_lengths, axis=0)
    np.testing.assert_allclose(mixed, weights[:, 0] * single[0] + weights[:, 1] * single[1], atol=1e-5)


def teacher_column(rank: int, num_ranks: int, address: str, case: Case, batch: RankBatch) -> np.ndarray:
    worker = make_worker(case, rank, num_ranks, address)
    worker.load_batch(batch)
    column = worker.compute_teacher_log_probs()
    worker.close()
    return column
