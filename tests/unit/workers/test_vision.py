"""Workers of vision-language models: training, checkpoints, reference, teacher and export."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from alphaapollo.batching.batch import Columns
from alphaapollo.config.resolve import resolve_model
from alphaapollo.config.schema import Model
from alphaapollo.workers.export import export_checkpoint
from alphaapollo.workers.policy import PolicyWorker
from tests.unit.workers.test_policy_worker import FAST
from tests.unit.workers.training import Case, Recorder, iterate_rows, parameters, scale_weights
from tests.vision.models import FAMILIES
from tests.vision.rows import compute_plain_logprobs, load_plain, load_processor, make_rows_with_images, make_test_image

TOWER = (".visual.", ".vision_tower.", ".multi_modal_projector.")


@pytest.fixture
def start_vision(start, vision_folder) -> Callable[..., tuple[PolicyWorker, Columns, Path]]:
    """Start a worker with rows that have images. Returns it, its columns and its model's folder."""

    def start_worker(family: str = "qwen3_vl", sender: Any = None, **fields: Any) -> Any:
        case = Case(family, num_rows=5, images=True)
        return *start(case, arguments={"sender": sender}, **fields), vision_folder(family)

    return start_worker


def select_sampled(worker: PolicyWorker, column: np.ndarray) -> np.ndarray:
    """Values of the sampled tokens."""
    return column[worker.batch.rows.action_mask.astype(bool)]


@torch.no_grad()
def compute_expected(plain: Any, worker: PolicyWorker, folder: Path) -> np.ndarray:
    """Log-probs of the sampled tokens at the temperature of the workers, from transformers."""
    rows = {tuple(row.token_ids): row for row in make_rows_with_images(folder)}
    parts = [
        compute_plain_logprobs(plain, rows[tuple(ids.tolist())], 0.9)[mask]
        for ids, _, _, mask in iterate_rows(worker.batch.rows)
    ]
    return torch.cat(parts).numpy()


def is_tower(name: str) -> bool:
    return any(part in name for part in TOWER)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("freeze_vision", [True, False])
def test_a_tower_is_trained_unless_it_is_frozen(start_vision, tmp_path: Path, family: str, freeze_vision: bool):
    """A checkpoint of either can be exported. test_resume.py continues from it."""
    worker, columns, folder = start_vision(family, actor=FAST, mini_batch_size=3, freeze_vision=freeze_vision)
    before = parameters(worker)
    worker.update(columns)
    changed = {name for name, value in parameters(worker).items() if (value != before[name]).any()}
    assert changed == {name for name in before if not (freeze_vision and is_tower(name))}
    worker.save(str(tmp_path / "saved"))
    model, out = resolve_model(Model(path=str(folder), freeze_vision=freeze_vision), "cpu"), str(tmp_path / "exported")
    assert export_checkpoint(str(tmp_path / "saved"), model, torch.float32, out, "merged", "policy") < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_export_and_sent_weights(start_vision, tmp_path: Path, family: str):
    """The exported folder has the processor and computes the same log-probs; names are those of the original files."""
    from safetensors.torch import load_file
    from transformers import AutoProcessor

    recorder = Recorder()
    worker, _, original = start_vision(family, sender=recorder, freeze_vision=False)
    scale_weights(worker.policy, 1.1)
    ours = select_sampled(worker, worker.compute_log_probs())
    folder = tmp_path / "exported"
    worker.export(str(folder))
    worker.send_weights(1)
    assert recorder.sent.keys() == load_file(original / "model.safetensors").keys()
    for key, value in load_file(folder / "model.safetensors").items():
        torch.testing.assert_close(recorder.sent[key], value, rtol=0, atol=0)
    np.testing.assert_allclose(ours, compute_expected(load_plain(folder), worker, original), atol=1e-5)

    before, exported = (json.loads(Path(path, "config.json").read_text()) for path in (original, folder))
    dtypes = [exported[part].pop("dtype") for part in ("text_config", "vision_config")]
    assert exported.pop("chat_template_digest") and dtypes == ["float32"] * 2 and exported == before
    processors = [AutoProcessor.from_pretrained(path) for path in (original, folder)]
    assert processors[0].chat_template == processors[1].chat_template == processors[1].tokenizer.chat_template
    first, second = (load_processor(path).prepare(make_test_image(32, 48)) for path in (original, folder))
    assert first.digest == second.digest and first.token_ids == second.token_ids


def test_adapters_train_and_are_exported(start_vision, tmp_path: Path):
    """A folder with adapters loads in peft, which adapts the same layers. The tower has layers of the same name."""
    from peft import PeftModel

    worker, columns, folder = start_vision("internvl", actor=FAST, lora_rank=2)
    worker.update(columns)
    ours = select_sampled(worker, worker.compute_log_probs())
    worker.export(str(tmp_path / "adapter"), "adapter")
    plain = load_plain(folder)
    adapted = PeftModel.from_pretrained(plain, str(tmp_path / "adapter")).eval()
    assert not any(is_tower(name) for name, _ in adapted.named_parameters() if "lora" in name)
    np.testing.assert_allclose(ours, compute_expected(plain, worker, folder), atol=1e-5)
