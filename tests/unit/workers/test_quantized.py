"""LoRA on weights of 4 bits equals LoRA on the same weights dequantized, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from alphaapollo.config.schema import Model
from alphaapollo.engines.weight_sync.digest import compute_joint_digest
from alphaapollo.engines.weight_sync.shared_memory import SharedAdapterSender
from alphaapollo.models.quantized import QuantizedLinear
from alphaapollo.workers.export import export_checkpoint
from tests.nightly import at_night
from tests.quantized import save_quantized
from tests.unit.tiny import run_ranks
from tests.unit.workers import training
from tests.unit.workers.layouts import compute
from tests.unit.workers.roles import ROLES
from tests.unit.workers.test_lora import TOKENS, in_peft, log_probs, trained_worker
from tests.unit.workers.training import Case

pytest.importorskip("peft")
LAYOUTS: dict[int, list[dict[str, Any]]] = {
    1: [{"dtype": "bfloat16", "checkpointing": True}],
    2: [
        {"max_tokens": 40},
        {"max_tokens": 40, "dtype": "bfloat16"},
        {"attention": "sdpa", "max_tokens": 60, "sequence_parallel": 2, "checkpointing": True},
        {"role": "sft", "actor": {}, "needs_reference": False, "checkpointing": "selective", "offloads": True},
    ],
}


@pytest.fixture(scope="module")
def folders(model_folder: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_quantized(model_folder("llama"), tmp_path_factory.mktemp("quantized"))


@pytest.mark.parametrize("num_ranks", at_night(LAYOUTS, [1]))
def test_gradients_and_log_probs_equal_those_of_the_dequantized_model(
    folders: tuple[Path, Path], num_ranks: int
) -> None:
    cases = [
        replace(ROLES["adapters"], folder=str(path), **layout) for layout in LAYOUTS[num_ranks] for path in folders
    ]
    for results in run_ranks(compute, num_ranks, cases):
        for quantized, plain in zip(results[::2], results[1::2], strict=True):
            assert max(np.abs(gradient).max() for gradient in plain.gradients.values()) > 1e-3
            for kind in ("gradients", "columns", "shared"):  # shared: the merged weights, and a probe
                found, expected = getattr(quantized, kind), getattr(plain, kind)
                assert found.keys() == expected.keys()
                for name, values in expected.items():
                    np.testing.assert_array_equal(found[name], values, err_msg=name)


def train_save_and_measure(rank: int, num_ranks: int, address: str, case: Case, folder: str) -> tuple[Any, ...]:
    sender = SharedAdapterSender(f"{folder}_sent", torch.float32, is_writer=rank == 0)
    worker = trained_worker(case, rank, num_ranks, address, sender=sender)
    layers = [layer for layer in worker.policy.modules() if isinstance(layer, QuantizedLinear)]
    nbytes = sum(tensor.to_local().nbytes for layer in layers for tensor in (layer.codes, layer.scale))
    worker.save(folder)
    ours = worker.compute_probe_log_probs(TOKENS[0].tolist())
    worker.close()
    return sender.base_digest, len(layers), nbytes, ours


def test_ranks_share_the_codes_whose_digest_is_that_of_the_files(folders: tuple[Path, Path], tmp_path: Path) -> None:
    from safetensors.torch import load_file

    case, saved = Case(str(folders[0]), dtype="bfloat16", lora_rank=4), str(tmp_path / "saved")
    (digest, count, first, ours), (other_digest, _, second, _) = run_ranks(train_save_and_measure, 2, case, saved)
    files = load_file(folders[0] / "model.safetensors")
    codes = [tensor.view(torch.uint8).float() for name, tensor in files.items() if name.endswith("_packed")]
    scales = [tensor for name, tensor in files.items() if name.endswith("_scale")]
    assert digest % 2**64 == other_digest % 2**64 == compute_joint_digest([*codes, *scales])
    assert count == len(codes) == 14
    assert first == second == sum(code.numel() for code in codes) / 2 + sum(scale.numel() for scale in scales)

    model = Model(path=str(folders[0]), lora_rank=4)
    export = partial(export_checkpoint, saved, model, torch.bfloat16)
    export(str(tmp_path / "merged"), "merged", "policy")
    assert export(str(tmp_path / "adapter"), "adapter", "policy") < 1e-5  # also of peft on the folder with codes
    merged = training.load_plain(tmp_path / "merged")
    assert not hasattr(merged.config, "quantization_config")
    adapted = log_probs(in_peft(str(folders[1]), tmp_path / "adapter"))
    assert adapted == pytest.approx(ours, abs=0.1)
    assert log_probs(merged) == pytest.approx(ours, abs=0.1)


def test_a_resumed_worker_continues_bit_for_bit(folders: tuple[Path, Path], start: Any, tmp_path: Path) -> None:
    case = Case(str(folders[0]), {"optim": {"lr": 1e-2}}, lora_rank=4)
    found = []
    for resumes in (False, True):
        worker, columns = start(case)
        if resumes:
            worker.load(str(tmp_path / "saved"))
        else:
            worker.update(columns)
            worker.save(str(tmp_path / "saved"))
        worker.update(columns)
        found.append(worker.compute_log_probs())
    np.testing.assert_array_equal(*found)
