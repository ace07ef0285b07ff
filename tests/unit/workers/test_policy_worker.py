from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from alphaapollo.algorithms.mismatch import POSITIONS
from tests.unit.tiny import run_ranks
from tests.unit.workers import training
from tests.unit.workers.training import Case

FAST = {"optim": {"lr": 1e-2, "lr_warmup_steps": 2}}


@pytest.mark.parametrize("epochs", [1, 2])
def test_missing_old_log_probs_are_those_before_the_first_step(start, epochs: int):
    """Without old log-probs in the columns the update is the same as with those of compute_log_probs."""
    results = []
    for own in (True, False):
        worker, columns = start(actor=FAST | {"ppo_epochs": epochs}, mini_batch_size=4, max_tokens=40)
        metrics = worker.update(replace(columns, old_logprobs=None if own else worker.compute_log_probs()))
        assert metrics["actor/optimizer_steps"] == 3 * epochs
        results.append((training.parameters(worker), metrics))
    training.assert_close(results[0][0], results[1][0], atol=0, rtol=0)
    assert results[0][1] == results[1][1]


def test_surprises_are_those_of_all_tokens(start):
    """The log-prob of each response token, and entropy and variance of its distribution."""
    worker, _ = start()
    rows, found = worker.batch.rows, worker.compute_surprises()
    np.testing.assert_allclose(found[:, 0], worker.compute_log_probs(), atol=1e-5)
    tokens = torch.from_numpy(rows.token_ids[: rows.lengths[0]].astype(np.int64))[None]
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(worker.config.path, dtype=torch.float32)
        logits = model(tokens).logits[0, rows.response_starts[0] - 1 : -1]
    logp = (logits.double() / worker.temperature).log_softmax(-1)
    mean = (logp.exp() * logp).sum(-1)
    expected = torch.stack([-mean, (logp.exp() * logp**2).sum(-1) - mean**2], 1)
    np.testing.assert_allclose(found[: len(expected), 1:], expected.numpy(), atol=1e-4)


def test_the_mismatch_with_the_engine_counts_positions_in_each_response(start):
    worker, columns = start()
    worker.update(columns)
    rows = worker.batch.rows
    positions = np.concatenate([*map(np.arange, rows.response_lengths)])[rows.action_mask.astype(bool)]
    counts = np.bincount(np.searchsorted(POSITIONS, positions, side="right") - 1, minlength=len(POSITIONS))
    np.testing.assert_array_equal(worker.sum_logprob_mismatch().position_counts, counts)


def test_a_checkpoint_before_the_first_step_has_no_step(start, tmp_path):
    """The first step moves each weight by the learning rate, because of Adam's bias correction."""
    moved = []
    for saves in (False, True):
        worker, columns = start(actor=FAST)
        if saves:
            worker.save(str(tmp_path))
            assert all(state["step"] == 0 for state in worker.state.optimizers[0].state.values())
        worker.update(columns)
        moved.append(training.parameters(worker))
    training.assert_close(moved[1], moved[0], atol=0, rtol=0)


def test_the_kl_of_ppo_kl_has_the_weights_of_the_penalty(start):
    """Rows without weight in the loss, here those with the largest KL, do not count."""
    actor = FAST | {"policy_loss": {"loss_mode": "ppo_kl"}, "loss_agg_mode": "seq-mean-token-mean"}
    worker, columns = start(actor=actor, rough=True)
    old = columns.old_logprobs.copy()
    old[np.repeat(columns.loss_weights == 0, worker.batch.rows.response_lengths)] -= 3.0
    metrics = worker.update(replace(columns, old_logprobs=old))
    d = worker.compute_log_probs() - old
    weights = np.repeat(columns.loss_weights, worker.batch.rows.response_lengths) * worker.batch.rows.action_mask
    expected = (weights * (np.expm1(d) - d)).sum() / weights.sum()
    assert metrics["actor/policy_kl"] == pytest.approx(expected, rel=1e-4)


def test_metrics_by_hand(start):
    """All old log-probs are much larger, so every ratio is tiny and each token with a negative advantage is clipped."""
    worker, columns = start()
    training.record_gradients(worker)
    assert columns.advantages is not None
    metrics = worker.update(replace(columns, old_logprobs=np.zeros_like(columns.advantages)))
    actions = worker.batch.rows.action_mask.astype(bool)
    assert metrics["actor/tokens"] == actions.sum()
    assert metrics["actor/pg_clipfrac"] == pytest.approx((columns.advantages[actions] < 0).mean())
    assert metrics["actor/clip_fraction_low"] == metrics["actor/pg_clipfrac"]  # every ratio is far below 1
    assert metrics["actor/clip_fraction_high"] == 0 and 0 < metrics["actor/ratio_max"] < 1
    assert metrics["actor/grad_norm_max"] >= metrics["actor/grad_norm"]
    np.testing.assert_array_equal(worker.get_old_log_probs(), np.zeros_like(columns.advantages))


def test_bad_steps_are_skipped_up_to_a_limit(start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """test_resume.py has single bad steps. A checkpoint does not reset the count."""
    monkeypatch.setattr("alphaapollo.models.train_state.MAX_SKIPPED_STEPS", 3)
    worker, columns = start()
    bad = replace(columns, advantages=np.full_like(columns.advantages, np.nan))
    worker.update(bad, skip_bad_step=True)
    worker.update(columns, skip_bad_step=True)
    worker.update(bad, skip_bad_step=True)
    worker.save(str(tmp_path / "saved"))
    worker, _ = start()
    worker.load(str(tmp_path / "saved"))
    metrics = worker.update(bad, skip_bad_step=True)
    assert metrics["actor/steps_skipped"] == metrics["actor/optimizer_steps"] == 1
    with pytest.raises(FloatingPointError, match="at optimizer step 2, 3 times in a row"):
        worker.update(bad, skip_bad_step=True)


@pytest.mark.parametrize("case", [Case("qwen3"), Case("qwen3_vl", images=True, num_rows=5, freeze_vision=False)])
def test_the_reference_changes_only_by_a_reset_which_resets_the_optimizer(start, case: Case):
    """A trained vision tower is a part of the reference."""
    worker, columns = start(case, needs_reference=True, actor={"optim": {"name": "muon"}})  # Muon and AdamW
    before = worker.compute_log_probs("reference")
    np.testing.assert_allclose(before, worker.compute_log_probs(), atol=1e-6)
    training.scale_weights(worker.policy, 1.2)
    worker.update(columns)
    np.testing.assert_array_equal(worker.compute_log_probs("reference"), before)
    assert [*worker.state._iterate_moments()]
    worker.reset_reference_and_optimizer()
    assert not [*worker.state._iterate_moments()]
    after = worker.compute_log_probs("reference")
    assert np.abs(after - before).max() > 1e-3
    np.testing.assert_array_equal(after, worker.compute_log_probs())


def train_and_save(rank: int, num_ranks: int, address: str, case: Case, load: str, save: str) -> dict[str, np.ndarray]:
    worker = training.make_worker(case, rank, num_ranks, address)
    batch = training.make_batch(case, num_ranks)
    if load:
        worker.load(load)
    worker.load_batch(batch.rank_batches[rank])
    worker.update(training.make_columns(case, batch, rank))
    worker.save(save)
    worker.export(f"{save}_hf")
    result = training.parameters(worker)
    worker.close()
    return result


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_checkpoint_and_export_across_numbers_of_ranks(model_folder, tmp_path: Path, name: str):
    """2 ranks -> 1 and 4, and 1 -> 2: the same numbers as with 1 rank only, and the exported folders load."""
    from transformers import AutoTokenizer

    case = Case(str(model_folder(name)), FAST, mini_batch_size=5)

    def train(num_ranks: int, load: str, save: str) -> list[dict[str, np.ndarray]]:
        folders = (load and f"{tmp_path}/{load}", f"{tmp_path}/{save}")
        return run_ranks(train_and_save, num_ranks, case, *folders, timeout=100)

    train(1, "", "one")
    (all_along,) = train(1, "one", "one_again")
    first, second = train(2, "", "two")
    training.assert_close(first, second, atol=0, rtol=0)
    for num_ranks, load in ((1, "two"), (2, "one"), (4, "two")):
        found = train(num_ranks, load, f"{load}_then_{num_ranks}")[0]
        training.assert_close(found, all_along, atol=2e-4, rtol=0)
    exported = tmp_path / "two_hf"
    for key, parameter in training.load_plain(exported).named_parameters():
        np.testing.assert_array_equal(parameter.detach().numpy(), first[f"model.{key}"])
    assert AutoTokenizer.from_pretrained(exported).eos_token == "<eos>"
    before, after = (json.loads(Path(path, "config.json").read_text()) for path in (case.folder, exported))
    assert after.pop("chat_template_digest") and after == before


def test_bfloat16_computes_with_float32_masters(start, tmp_path: Path):
    fields = {"dtype": "bfloat16", "needs_reference": True, "actor": FAST | {"use_kl_loss": True}}
    worker, columns = start("llama", **fields)
    before, ref = worker.compute_log_probs(), worker.compute_log_probs("reference")
    assert np.abs(before - ref).max() < 0.1
    worker.update(columns)
    assert {p.dtype for p in worker.policy.parameters()} == {torch.float32}
    assert np.abs(worker.compute_log_probs() - before).max() > 1e-2
    worker.export(str(tmp_path / "model"))
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "bfloat16"


def test_errors_name_an_invalid_checkpoint(start, tmp_path: Path):
    worker, _ = start()
    with pytest.raises(ValueError, match=rf"{tmp_path} .*state\.json"):
        worker.load(str(tmp_path))
    worker.save(str(tmp_path / "saved"))
    for file in (tmp_path / "saved" / "model").glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match=f"{tmp_path}/saved cannot be read"):
        worker.load(str(tmp_path / "saved"))


def test_the_entropy_is_computed_only_if_it_is_used(start):
    for settings, measures, is_computed in (
        ({}, True, True),
        ({}, False, False),
        ({"entropy_coeff": 0.1}, False, True),
    ):
        worker, columns = start(actor=settings)
        metrics = worker.update(columns, measures_entropy=measures)
        assert ("actor/entropy" in metrics) is is_computed and "actor/pg_loss" in metrics
