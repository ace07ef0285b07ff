"""Workers of vision-language models: training, checkpoints, reference, teacher and export."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from alphaapollo.config.resolve import resolve_model
from alphaapollo.config.schema import Model
from alphaapollo.data.batch import TrainBatch
from alphaapollo.models.sharding import full_tensor
from alphaapollo.workers.export import export_checkpoint
from alphaapollo.workers.policy import PolicyWorker
from tests.unit.tiny import free_address
from tests.unit.workers.test_policy_worker import FAST, Recorder, parameters
from tests.unit.workers.training import Case, make_batch, make_columns, make_worker, scale_weights
from tests.vision.models import FAMILIES
from tests.vision.rows import compute_plain_logprobs, load_plain, load_processor, make_picture, make_rows_with_pictures

TOWER = (".visual.", ".vision_tower.", ".multi_modal_projector.")


@pytest.fixture
def make(vision_folder) -> Iterator[Any]:
    workers: list[PolicyWorker] = []

    def worker(family: str = "qwen3_vl", sender: Any = None, **fields: Any) -> tuple[PolicyWorker, Case]:
        case = Case(str(vision_folder(family)), num_rows=5, pictures=True, **fields)
        workers.append(make_worker(case, 0, 1, free_address(), sender=sender))
        return workers[-1], case

    yield worker
    for one in workers:
        one.close()


def select_sampled(batch: TrainBatch, column: np.ndarray) -> np.ndarray:
    """Values of the sampled tokens, in the order of make_rows_with_pictures."""
    mask = batch.join_columns([batch.rank_batches[0].rows.action_mask])
    return batch.join_columns([column])[mask.astype(bool)]


@torch.no_grad()
def compute_expected(plain: Any, case: Case) -> np.ndarray:
    """Log-probs of the sampled tokens at the temperature of the workers, from transformers."""
    rows = make_rows_with_pictures(Path(case.folder))
    masks = [torch.tensor(row.action_mask[row.response_start :]).bool() for row in rows]
    parts = [compute_plain_logprobs(plain, row, 0.9)[mask] for row, mask in zip(rows, masks, strict=True)]
    return torch.cat(parts).numpy()


def is_tower(name: str) -> bool:
    return any(part in name for part in TOWER)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("freeze_vision", [True, False])
def test_training_and_resume_bit_for_bit(make, tmp_path: Path, family: str, freeze_vision: bool):
    settings = {"actor": FAST, "mini_batch_size": 3, "freeze_vision": freeze_vision}
    worker, case = make(family, **settings)
    start, batch = parameters(worker), make_batch(case, 1)
    columns = make_columns(case, batch, 0)
    worker.load_batch(batch.rank_batches[0])
    worker.update(columns)
    worker.save(str(tmp_path / "saved"))
    worker.update(columns)
    changed = {name for name, value in parameters(worker).items() if (value != start[name]).any()}
    assert changed == {name for name in start if not (freeze_vision and is_tower(name))}

    resumed, _ = make(family, **settings)
    resumed.load(str(tmp_path / "saved"))
    resumed.load_batch(batch.rank_batches[0])
    resumed.update(columns)
    for name, value in parameters(worker).items():
        np.testing.assert_array_equal(parameters(resumed)[name], value)

    folder = tmp_path / "exported"
    model = resolve_model(Model(path=case.folder, freeze_vision=freeze_vision), "cpu")
    assert export_checkpoint(str(tmp_path / "saved"), model, torch.float32, str(folder), "merged", "policy") < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_export_and_sent_weights(make, tmp_path: Path, family: str):
    """The exported folder has the processor and computes the same log-probs; names are those of the original files."""
    from safetensors.torch import load_file
    from transformers import AutoProcessor

    recorder = Recorder()
    worker, case = make(family, sender=recorder, freeze_vision=False)
    scale_weights(worker.policy, 1.1)
    batch = make_batch(case, 1)
    worker.load_batch(batch.rank_batches[0])
    ours = select_sampled(batch, worker.compute_log_probs())
    folder = tmp_path / "exported"
    worker.export(str(folder))
    worker.send_weights(1)
    assert recorder.sent.keys() == load_file(Path(case.folder) / "model.safetensors").keys()
    for key, value in load_file(folder / "model.safetensors").items():
        torch.testing.assert_close(recorder.sent[key], value, rtol=0, atol=0)
    plain = load_plain(folder)
    np.testing.assert_allclose(ours, compute_expected(plain, case), atol=1e-5)

    original, exported = (json.loads(Path(path, "config.json").read_text()) for path in (case.folder, folder))
    dtypes = [exported[part].pop("dtype") for part in ("text_config", "vision_config")]
    assert exported.pop("chat_template_digest") and dtypes == ["float32"] * 2 and exported == original
    processors = [AutoProcessor.from_pretrained(path) for path in (case.folder, folder)]
    assert processors[0].chat_template == processors[1].chat_template == processors[1].tokenizer.chat_template
    first, second = (load_processor(path).prepare(make_picture(32, 48)) for path in (Path(case.folder), folder))
    assert first.digest == second.digest and first.token_ids == second.token_ids


def test_reset_reference_copies_the_tower(make, tmp_path: Path):
    worker, case = make(needs_reference=True, freeze_vision=False)
    worker.load_batch(make_batch(case, 1).rank_batches[0])
    before = worker.compute_ref_log_probs()
    np.testing.assert_array_equal(before, worker.compute_log_probs())
    scale_weights(worker.policy, 1.2)
    worker.reset_reference_and_optimizer()
    after = worker.compute_ref_log_probs()
    assert np.abs(after - before).max() > 1e-3
    np.testing.assert_array_equal(after, worker.compute_log_probs())
    worker.save(str(tmp_path / "saved"))
    resumed, _ = make(needs_reference=True, freeze_vision=False)
    resumed.load(str(tmp_path / "saved"))
    resumed.load_batch(worker.batch)
    np.testing.assert_array_equal(resumed.compute_ref_log_probs(), after)


def test_adapters_train_and_are_exported(make, tmp_path: Path):
    """A folder with adapters loads in peft, which adapts the same layers. The tower has layers of the same name."""
    from peft import PeftModel

    worker, case = make("internvl", actor=FAST, lora_rank=2)
    batch = make_batch(case, 1)
    worker.load_batch(batch.rank_batches[0])
    worker.update(make_columns(case, batch, 0))
    ours = select_sampled(batch, worker.compute_log_probs())
    worker.export(str(tmp_path / "adapter"), "adapter")
    plain = load_plain(Path(case.folder))
    adapted = PeftModel.from_pretrained(plain, str(tmp_path / "adapter")).eval()
    assert not any(is_tower(name) for name, _ in adapted.named_parameters() if "lora" in name)
    np.testing.assert_allclose(ours, compute_expected(plain, case), atol=1e-5)


@pytest.mark.parametrize("teacher", ["qwen3_vl", "qwen2_5_vl"])
def test_teacher_computes_rows_with_pictures(make, vision_folder, teacher: str):
    """Both models have the same processor and placeholder tokens."""
    folder = vision_folder(teacher)
    worker, case = make("qwen3_vl", teacher={"divergence": "reverse"}, teacher_folder=str(folder))
    batch = make_batch(case, 1)
    worker.load_batch(batch.rank_batches[0])
    ours = select_sampled(batch, worker.compute_teacher_log_probs())
    plain = load_plain(folder)
    np.testing.assert_allclose(ours, compute_expected(plain, case), atol=1e-5)
    metrics = worker.update(make_columns(case, batch, 0))
    assert all(np.isfinite(value) for value in metrics.values())
    assert all(np.isfinite(full_tensor(value.detach()).numpy()).all() for value in worker.policy.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_trains_the_tower(make, family: str):
    """Image features and log-probs are those of float32 up to rounding, and all parameters change."""
    worker, case = make(family, dtype="bfloat16", freeze_vision=False, actor=FAST, checkpointing=True)
    batch, start = make_batch(case, 1), parameters(worker)
    worker.load_batch(batch.rank_batches[0])
    expected = compute_expected(load_plain(Path(case.folder)), case)
    np.testing.assert_allclose(select_sampled(batch, worker.compute_log_probs()), expected, atol=0.1)
    worker.update(make_columns(case, batch, 0))
    assert all((value != start[name]).any() for name, value in parameters(worker).items())
