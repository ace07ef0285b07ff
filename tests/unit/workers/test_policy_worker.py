from __future__ import annotations

import json
import re
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from alphaapollo.config.load import load_config
from alphaapollo.config.schema import Config, RolloutCorrection
from alphaapollo.models.sharding import full_tensor, local_tensor
from alphaapollo.types import WeightUpdate
from alphaapollo.workers.policy import PolicyWorker
from tests.unit.tiny import free_address, run_ranks
from tests.unit.workers.training import Case, make_batch, make_columns, make_worker, record_gradients, scale_weights

FAST = {"optim": {"lr": 1e-2, "lr_warmup_steps": 2}}


@pytest.fixture
def make(model_folder) -> Iterator[Any]:
    """Make workers of one rank, which are closed at the end."""
    workers: list[PolicyWorker] = []

    def worker(name: str = "qwen3", **fields: Any) -> tuple[PolicyWorker, Case]:
        arguments = {key: fields.pop(key) for key in ("sender", "correction") if key in fields}
        case = Case(str(model_folder(name)), **fields)
        workers.append(make_worker(case, 0, 1, free_address(), **arguments))
        return workers[-1], case

    yield worker
    for one in workers:
        one.close()


def parameters(worker: PolicyWorker) -> dict[str, np.ndarray]:
    return {n: full_tensor(p.detach()).numpy().copy() for n, p in worker.policy.named_parameters()}


def plain_logprobs(folder: str, token_ids: np.ndarray, temperature: float) -> np.ndarray:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.from_numpy(token_ids)[None]
    with torch.no_grad():
        logp = (model(ids).logits[0, :-1] / temperature).log_softmax(-1)
    return logp.gather(1, ids[0, 1:, None])[:, 0].numpy()


def test_log_probs_are_in_the_order_of_the_rows(make):
    worker, case = make(max_tokens=40, mini_batch_size=4)
    batch = make_batch(case, 1)
    rows = batch.rank_batches[0].rows
    worker.load_batch(batch.rank_batches[0])
    column = worker.compute_log_probs()
    assert column.dtype == np.float32
    for row in (0, 7):
        ids = rows.token_ids[rows.token_offsets[row] : rows.token_offsets[row + 1]]
        expected = plain_logprobs(case.folder, ids, 0.9)[rows.response_starts[row] - 1 :]
        ours = column[rows.response_offsets[row] : rows.response_offsets[row + 1]]
        np.testing.assert_allclose(ours, expected, atol=1e-5)


def test_probe_is_at_temperature_one(make):
    worker, case = make("llama")
    expected = plain_logprobs(case.folder, np.array([5, 9, 3, 3, 40]), 1.0)
    assert worker.compute_probe_log_probs([5, 9, 3, 3, 40]) == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.mark.parametrize("epochs", [1, 2])
def test_missing_old_log_probs_are_those_before_the_first_step(make, epochs: int):
    """Without old log-probs in the columns the update is the same as with those of compute_log_probs."""
    results = []
    for own in (True, False):
        worker, case = make(actor=FAST | {"ppo_epochs": epochs}, mini_batch_size=4, max_tokens=40)
        batch = make_batch(case, 1)
        worker.load_batch(batch.rank_batches[0])
        columns = make_columns(case, batch, 0)
        old = None if own else worker.compute_log_probs()
        metrics = worker.update(replace(columns, old_logprobs=old))
        assert metrics["actor/optimizer_steps"] == 3 * epochs
        results.append((parameters(worker), metrics))
    for name, value in results[0][0].items():
        np.testing.assert_array_equal(value, results[1][0][name])
    assert results[0][1] == results[1][1]


def test_a_checkpoint_before_the_first_step_has_no_step(make, tmp_path):
    """The first step moves each weight by the learning rate, because of Adam's bias correction."""
    moved = []
    for saves in (False, True):
        worker, case = make(actor=FAST)
        batch = make_batch(case, 1)
        worker.load_batch(batch.rank_batches[0])
        if saves:
            worker.save(str(tmp_path))
            assert all(state["step"] == 0 for state in worker.state.optimizers[0].state.values())
        worker.update(make_columns(case, batch, 0))
        moved.append(parameters(worker))
    for name, value in moved[0].items():
        np.testing.assert_array_equal(moved[1][name], value)


def test_learning_rate_follows_the_optimizer_steps(make):
    worker, case = make(actor=FAST, mini_batch_size=5)
    batch = make_batch(case, 1)
    worker.load_batch(batch.rank_batches[0])
    metrics = worker.update(make_columns(case, batch, 0))
    assert worker.state.num_steps == 2
    assert metrics["actor/lr"] == pytest.approx(1e-2)


def test_metrics_by_hand(make):
    """All old log-probs are much larger, so every ratio is tiny and each token with a negative advantage is clipped."""
    worker, case = make()
    record_gradients(worker)
    batch = make_batch(case, 1)
    rank = batch.rank_batches[0]
    worker.load_batch(rank)
    columns = make_columns(case, batch, 0)
    assert columns.advantages is not None
    metrics = worker.update(replace(columns, old_logprobs=np.zeros_like(columns.advantages)))
    actions = rank.rows.action_mask.astype(bool)
    assert metrics["actor/tokens"] == actions.sum()
    assert metrics["actor/pg_clipfrac"] == pytest.approx((columns.advantages[actions] < 0).mean())
    assert metrics["actor/clip_fraction_low"] == metrics["actor/pg_clipfrac"]  # every ratio is far below 1
    assert metrics["actor/clip_fraction_high"] == 0 and 0 < metrics["actor/ratio_max"] < 1
    assert metrics["actor/grad_norm_max"] >= metrics["actor/grad_norm"]
    np.testing.assert_array_equal(worker.get_old_log_probs(), np.zeros_like(columns.advantages))


def test_the_error_of_a_bad_step_suggests_valid_keys(make):
    worker, case = make()
    batch = make_batch(case, 1)
    worker.load_batch(batch.rank_batches[0])
    columns, before = make_columns(case, batch, 0), parameters(worker)
    with pytest.raises(FloatingPointError, match=r"policy.s gradient norm is nan at optimizer step 1;") as error:
        worker.update(replace(columns, advantages=np.full_like(columns.advantages, np.nan)))
    for name, value in parameters(worker).items():
        np.testing.assert_array_equal(value, before[name])
    keys = re.findall(r"[a-z_.]+=[\w.-]+", str(error.value))
    assert keys == [
        "data.seed=1000",
        "trainer.on_bad_step=skip",
        "actor_rollout_ref.actor.optim.lr=1e-07",
    ]
    config = load_config(Config, "ppo", keys)
    assert (config.data.seed, config.trainer.on_bad_step) == (1000, "skip")


def test_non_finite_weights_are_not_saved_or_exported(make, tmp_path: Path):
    worker, _ = make()
    (*_, (name, parameter)) = worker.policy.named_parameters()
    local_tensor(parameter.data).view(-1)[3] = np.inf
    for write in (worker.save, worker.export):
        with pytest.raises(FloatingPointError, match=rf"1 of the policy.s \d+ parameters are not finite.*{name}"):
            write(str(tmp_path / "saved"))
    assert not (tmp_path / "saved").exists()


def test_bad_steps_are_skipped_up_to_a_limit(make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    worker, case = make()
    batch = make_batch(case, 1)
    worker.load_batch(batch.rank_batches[0])
    columns, before = make_columns(case, batch, 0), parameters(worker)
    bad = np.full_like(columns.advantages, np.nan)
    metrics = worker.update(replace(columns, advantages=bad), skip_bad_step=True)
    assert metrics["actor/steps_skipped"] == metrics["actor/optimizer_steps"] == 1
    assert worker.state.num_steps == 0
    for name, value in parameters(worker).items():
        np.testing.assert_array_equal(value, before[name])
    metrics = worker.update(columns, skip_bad_step=True)
    assert metrics["actor/steps_skipped"] == 0 and worker.state.num_steps == 1
    assert np.isfinite(metrics["actor/grad_norm"]), "nothing is left of the bad gradients"
    monkeypatch.setattr("alphaapollo.models.training.train_state.MAX_SKIPPED_STEPS", 3)
    worker.update(replace(columns, advantages=bad), skip_bad_step=True)
    worker.save(str(tmp_path / "saved"))
    worker, _ = make()
    worker.load(str(tmp_path / "saved"))  # which does not reset the count
    worker.load_batch(batch.rank_batches[0])
    worker.update(replace(columns, advantages=bad), skip_bad_step=True)
    with pytest.raises(FloatingPointError, match="at optimizer step 2, 3 times in a row"):
        worker.update(replace(columns, advantages=bad), skip_bad_step=True)


def test_the_reference_changes_only_by_a_reset(make, tmp_path: Path):
    worker, case = make(needs_reference=True)
    worker.load_batch(make_batch(case, 1).rank_batches[0])
    before = worker.compute_ref_log_probs()
    np.testing.assert_allclose(before, worker.compute_log_probs(), atol=1e-6)
    scale_weights(worker.policy, 1.2)
    np.testing.assert_array_equal(worker.compute_ref_log_probs(), before)
    worker.reset_reference_and_optimizer()
    after = worker.compute_ref_log_probs()
    assert np.abs(after - before).max() > 1e-2
    np.testing.assert_array_equal(after, worker.compute_log_probs())

    worker.save(str(tmp_path / "saved"))
    resumed, _ = make(needs_reference=True)
    resumed.load(str(tmp_path / "saved"))
    resumed.load_batch(make_batch(case, 1).rank_batches[0])
    np.testing.assert_array_equal(resumed.compute_ref_log_probs(), after)


def test_hard_reset_resets_the_optimizer(make):
    """Two workers with the same weights, one that made steps before its reset and a new one."""
    worker, case = make(needs_reference=True)
    batch = make_batch(case, 1)
    columns = make_columns(case, batch, 0)
    worker.load_batch(batch.rank_batches[0])
    worker.update(columns)
    worker.reset_reference_and_optimizer()
    fresh, _ = make(needs_reference=True)
    for own, other in zip(fresh.policy.parameters(), worker.policy.parameters(), strict=True):
        local_tensor(own).data.copy_(local_tensor(other))
    fresh.load_batch(batch.rank_batches[0])
    for one in (worker, fresh):
        one.update(columns)
    for name, value in parameters(fresh).items():
        np.testing.assert_array_equal(value, parameters(worker)[name])


def test_correction_weights_only_the_policy_term(make):
    """Engine log-probs are much larger than the trainer's, so every rho is e^-5, below the bound."""
    _, case = make()
    batch = make_batch(case, 1)
    rank = batch.rank_batches[0]
    rows = replace(rank.rows, rollout_logprobs=np.full_like(rank.rows.rollout_logprobs, 5.0))
    columns = replace(make_columns(case, batch, 0), old_logprobs=np.zeros_like(rank.rows.rollout_logprobs))
    metrics = {}
    for name, settings in {
        "none": {},
        "tis": {"method": "tis", "high": 2.0},
        "mask": {"method": "mask", "low": 0.5, "high": 5.0},
    }.items():
        worker, _ = make(correction=RolloutCorrection(**settings))
        record_gradients(worker)
        worker.load_batch(replace(rank, rows=rows))
        metrics[name] = worker.update(columns)
    assert metrics["tis"]["actor/pg_loss"] == pytest.approx(metrics["none"]["actor/pg_loss"] * np.exp(-5), rel=1e-5)
    assert metrics["tis"]["actor/correction_weight"] == pytest.approx(np.exp(-5))
    assert metrics["mask"]["actor/pg_loss"] == 0.0
    assert metrics["mask"]["actor/correction_dropped"] == 1.0
    assert metrics["mask"]["actor/entropy"] == metrics["none"]["actor/entropy"]


class Recorder:
    def send(self, tensors: Any, version: int) -> WeightUpdate | None:
        self.sent = dict(tensors)
        return WeightUpdate(version, "digest")


@pytest.mark.parametrize("name", ["qwen3", "llama", "qwen3_moe"])
def test_weights_are_sent_with_checkpoint_names(make, name: str):
    from safetensors.torch import load_file

    recorder = Recorder()
    worker, case = make(name, sender=recorder)
    update = worker.send_weights(3)
    assert update is not None and update.version == 3
    expected = load_file(Path(case.folder) / "model.safetensors")
    assert recorder.sent.keys() == expected.keys()  # tied: lm_head is not there; MoE: one tensor an expert
    for key, value in expected.items():
        torch.testing.assert_close(recorder.sent[key], value, rtol=0, atol=0)


def test_checkpoint_resumes_bit_for_bit(make, tmp_path: Path):
    worker, case = make(actor=FAST, mini_batch_size=5)
    batch = make_batch(case, 1)
    columns = make_columns(case, batch, 0)
    worker.load_batch(batch.rank_batches[0])
    worker.update(columns)
    worker.save(str(tmp_path / "saved"))
    drawn = torch.rand(3)
    worker.update(columns)

    resumed, _ = make(actor=FAST, mini_batch_size=5)
    torch.manual_seed(99)
    resumed.load(str(tmp_path / "saved"))
    assert resumed.state.num_steps == 2
    torch.testing.assert_close(torch.rand(3), drawn, rtol=0, atol=0)
    resumed.load_batch(batch.rank_batches[0])
    resumed.update(columns)
    for name, value in parameters(worker).items():
        np.testing.assert_array_equal(parameters(resumed)[name], value)


def train_and_save(rank: int, num_ranks: int, address: str, case: Case, load: str, save: str) -> dict[str, np.ndarray]:
    worker = make_worker(case, rank, num_ranks, address)
    batch = make_batch(case, num_ranks)
    if load:
        worker.load(load)
    worker.load_batch(batch.rank_batches[rank])
    worker.update(make_columns(case, batch, rank))
    worker.save(save)
    worker.export(f"{save}_hf")
    result = parameters(worker)
    worker.close()
    return result


def train_on_two(
    rank: int, num_ranks: int, address: str, more: list[str], cases: list[Case], folder: Path
) -> list[dict[str, np.ndarray]]:
    """Weights after training from the start, and from a checkpoint of one rank."""
    results = []
    for case, name in zip(cases, MODELS, strict=True):
        for load, save, own in (("", "two", more.pop()), (f"{folder}/{name}/one", "then_two", more.pop())):
            results.append(train_and_save(rank, num_ranks, own, case, load, f"{folder}/{name}/{save}"))
    return results


MODELS = ["qwen3", "qwen3_moe"]


@pytest.mark.timeout(360)
def test_checkpoint_and_export_across_numbers_of_ranks(model_folder, tmp_path: Path):
    """2 ranks -> 1 and 4, and 1 -> 2: the same numbers as with 1 rank only, and the exported folders load."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def on_one(case: Case, load: str, save: str) -> dict[str, np.ndarray]:
        return train_and_save(0, 1, free_address(), case, load, save)

    cases = [Case(str(model_folder(name)), FAST, mini_batch_size=5) for name in MODELS]
    for name, case in zip(MODELS, cases, strict=True):
        on_one(case, "", f"{tmp_path}/{name}/one")
    addresses = [free_address() for _ in range(2 * len(cases))]
    ranks = run_ranks(train_on_two, 2, addresses, cases, tmp_path, timeout=200)
    saved = (f"{tmp_path}/{MODELS[0]}/two", f"{tmp_path}/{MODELS[0]}/then_four")
    then_four = run_ranks(train_and_save, 4, cases[0], *saved, timeout=100)[0]
    for index, (name, case) in enumerate(zip(MODELS, cases, strict=True)):
        folder = tmp_path / name
        all_along = on_one(case, f"{folder}/one", f"{folder}/one_again")
        then_one = on_one(case, f"{folder}/two", f"{folder}/then_one")
        first, then_two = (ranks[0][2 * index + i] for i in (0, 1))
        for key, value in all_along.items():
            np.testing.assert_allclose(then_one[key], value, atol=2e-4, err_msg=key)
            np.testing.assert_allclose(then_two[key], value, atol=2e-4, err_msg=key)
            np.testing.assert_array_equal(first[key], ranks[1][2 * index][key])
            if index == 0:
                np.testing.assert_allclose(then_four[key], value, atol=2e-4, err_msg=key)

        model = AutoModelForCausalLM.from_pretrained(folder / "two_hf")
        for key, parameter in model.named_parameters():
            np.testing.assert_array_equal(parameter.detach().numpy(), first[f"model.{key}"])
        assert AutoTokenizer.from_pretrained(folder / "two_hf").eos_token == "<eos>"
        original, exported = (
            json.loads(Path(path, "config.json").read_text()) for path in (case.folder, folder / "two_hf")
        )
        assert exported.pop("chat_template_digest") and exported == original


def test_bfloat16_computes_with_float32_masters(make, tmp_path: Path):
    worker, case = make("llama", dtype="bfloat16", needs_reference=True, actor=FAST | {"use_kl_loss": True})
    batch = make_batch(case, 1)
    worker.load_batch(batch.rank_batches[0])
    before, ref = worker.compute_log_probs(), worker.compute_ref_log_probs()
    assert np.abs(before - ref).max() < 0.1
    worker.update(make_columns(case, batch, 0, ref=True))
    assert {p.dtype for p in worker.policy.parameters()} == {torch.float32}
    assert np.abs(worker.compute_log_probs() - before).max() > 1e-2
    worker.export(str(tmp_path / "model"))
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "bfloat16"


def test_the_error_of_a_full_disk_names_the_folder(make, tmp_path: Path):
    worker, _ = make()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match=f"cannot write the checkpoint {tmp_path}/saved: .*"):
            worker.save(str(tmp_path / "saved"))
        with pytest.raises(OSError, match=f"cannot write the model to {tmp_path}/model"):
            worker.export(str(tmp_path / "model"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_errors_name_an_invalid_checkpoint(make, tmp_path: Path):
    worker, _ = make()
    with pytest.raises(ValueError, match=r"the checkpoint .* cannot be read: .*state\.json.* Resume from another"):
        worker.load(str(tmp_path))
    worker.save(str(tmp_path / "saved"))
    for file in (tmp_path / "saved" / "model").glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match="cannot be read"):
        worker.load(str(tmp_path / "saved"))


def test_memory_of_the_process(make):
    worker, _ = make()
    metrics = worker.get_memory_metrics()
    assert 0.05 < metrics["rss_gib"] <= metrics["rss_peak_gib"] * 1.1 < 50
