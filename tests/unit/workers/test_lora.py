"""LoRA compared with peft on the plain Hugging Face model. test_layouts.py has all layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from alphaapollo.config.schema import Model
from alphaapollo.models.lora import is_adapter_parameter
from alphaapollo.models.sharding import full_tensor, local_tensor
from alphaapollo.workers.export import export_checkpoint
from alphaapollo.workers.policy import PolicyWorker
from alphaapollo.workers.reference import ReferenceModel
from tests.unit.tiny import run_ranks
from tests.unit.workers import training
from tests.unit.workers.training import Case

pytest.importorskip("peft")

FAST = {"optim": {"lr": 1e-2}}
FULL = FAST | {"entropy_coeff": 0.1, "use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": "full"}
TOKENS = torch.tensor([[5, 9, 3, 3, 40, 7, 8]])


def trained_worker(case: Case, *placement: Any, **arguments: Any) -> PolicyWorker:
    worker = training.make_worker(case, *placement, **arguments)
    training.train_by_hand(worker.policy)
    return worker


def adapters(model: nn.Module) -> dict[str, np.ndarray]:
    return {n: full_tensor(p.detach()).numpy().copy() for n, p in model.named_parameters() if is_adapter_parameter(n)}


def in_peft(base: str, adapter: Path) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(training.load_plain(base), str(adapter), is_trainable=True).eval()


def log_probs(model: Any) -> list[float]:
    return training.plain_logprobs(model, TOKENS[0], 1.0).tolist()


@pytest.mark.parametrize("name", ["qwen3", "llama", "qwen3_moe"])
def test_forward_export_and_engine_equal_peft(model_folder, tmp_path: Path, name: str):
    """Our forward pass, the adapter folder in plain peft, the merged folder, and the engine's weights."""
    recorder = training.Recorder()
    case = Case(str(model_folder(name)), lora_rank=4)
    worker = trained_worker(case, sender=recorder)
    ours = worker.compute_probe_log_probs(TOKENS[0].tolist())
    assert ours != pytest.approx(log_probs(training.load_plain(case.folder)), abs=1e-2)
    worker.export(str(tmp_path / "adapter"), "adapter")
    worker.export(str(tmp_path / "merged"))
    worker.send_weights(1)
    worker.close()
    assert ours == pytest.approx(log_probs(in_peft(case.folder, tmp_path / "adapter")), abs=1e-4)
    assert ours == pytest.approx(log_probs(training.load_plain(tmp_path / "merged")), abs=1e-4)

    from safetensors.torch import load_file

    expected = load_file(tmp_path / "merged" / "model.safetensors")
    assert recorder.sent.keys() == expected.keys() == load_file(Path(case.folder) / "model.safetensors").keys()
    merged = in_peft(case.folder, tmp_path / "adapter").merge_and_unload().state_dict()
    for key, value in expected.items():
        torch.testing.assert_close(recorder.sent[key], value, rtol=0, atol=0)
        if key in merged:  # transformers fuses the experts into one tensor
            torch.testing.assert_close(value, merged[key], rtol=1e-6, atol=1e-7)


def test_the_reference_is_the_base_model(start):
    worker, columns = start(actor=FULL, lora_rank=4, needs_reference=True)
    assert type(worker.find_plugin("reference")) is ReferenceModel
    training.train_by_hand(worker.policy)
    before, reference = worker.compute_log_probs(), worker.compute_log_probs("reference")
    assert np.abs(before - reference).max() > 1e-2
    np.testing.assert_array_equal(worker.compute_log_probs(), before)
    assert worker.update(columns)["actor/ref_kl"] > 1e-3
    np.testing.assert_array_equal(worker.compute_log_probs("reference"), reference)
    whole, _ = start(actor=FULL, needs_reference=True)
    np.testing.assert_allclose(whole.compute_log_probs("reference"), reference, atol=1e-6)


def test_a_new_adapter_changes_no_output_and_depends_on_the_seed(start, model_folder):
    expected, found = log_probs(training.load_plain(model_folder("qwen3"))), []
    for seed in (0, 0, 1):
        worker, _ = start(lora_rank=4, arguments={"seed": seed})
        assert worker.compute_probe_log_probs(TOKENS[0].tolist()) == pytest.approx(expected, abs=1e-4)
        found.append(adapters(worker.policy))
    name = next(name for name in found[0] if ".lora_A." in name)
    np.testing.assert_array_equal(found[0][name], found[1][name])
    assert np.abs(found[0][name] - found[2][name]).max() > 0.01


def test_checkpoints_contain_only_the_adapter(start, tmp_path: Path):
    worker, columns = start(lora_rank=4)
    worker.update(columns)
    worker.save(str(tmp_path / "saved"))

    from torch.distributed.checkpoint import FileSystemReader

    kept = FileSystemReader(tmp_path / "saved" / "model").read_metadata().state_dict_metadata
    tensors = [name for name in kept if not name.startswith("optimizer.param_groups")]
    assert tensors and all(is_adapter_parameter(f"{name}.") for name in tensors), tensors
    whole, _ = start()
    with pytest.raises(ValueError, match=f"{tmp_path}/saved cannot be read"):
        whole.load(str(tmp_path / "saved"))


def save_on_two(rank: int, num_ranks: int, address: str, case: Case, folder: str) -> list[float]:
    worker = trained_worker(case, rank, num_ranks, address)
    worker.save(folder)
    worker.export(f"{folder}_adapter", "adapter")
    ours = worker.compute_probe_log_probs(TOKENS[0].tolist())
    worker.close()
    return ours


def test_export_of_a_checkpoint_of_two_ranks(model_folder, tmp_path: Path):
    case = Case(str(model_folder("qwen3")), lora_rank=4)
    ours, _ = run_ranks(save_on_two, 2, case, str(tmp_path / "saved"))
    model = Model(path=case.folder, lora_rank=4)
    for kind in ("merged", "adapter"):
        export_checkpoint(str(tmp_path / "saved"), model, torch.float32, str(tmp_path / kind), kind, "policy")
    assert log_probs(training.load_plain(tmp_path / "merged")) == pytest.approx(ours, abs=1e-4)
    for adapter in ("adapter", "saved_adapter"):
        assert log_probs(in_peft(case.folder, tmp_path / adapter)) == pytest.approx(ours, abs=1e-4)


def test_the_base_has_the_dtype_of_forward_and_backward(start):
    worker, columns = start("llama", actor=FULL, dtype="bfloat16", lora_rank=4, needs_reference=True)
    for name, parameter in worker.policy.named_parameters():
        assert parameter.dtype == (torch.float32 if is_adapter_parameter(name) else torch.bfloat16)
        assert parameter.requires_grad == is_adapter_parameter(name)
    states = worker.state.optimizers[0].state
    before = worker.compute_log_probs()
    worker.update(columns)
    assert np.abs(worker.compute_log_probs() - before).max() > 1e-2
    assert {state["exp_avg"].dtype for state in states.values()} == {torch.float32}
    assert len(states) == sum(is_adapter_parameter(name) for name, _ in worker.policy.named_parameters())


def test_the_critic_trains_its_adapter_and_its_head(start):
    worker, columns = start(Case("llama", role="critic", dtype="bfloat16", lora_rank=4, settings=FAST))
    before = {name: local_tensor(p).clone() for name, p in worker.model.named_parameters()}
    for _ in range(2):  # at the first step B is 0, and so is A's gradient
        worker.update(columns)
    for name, parameter in worker.model.named_parameters():
        trained = is_adapter_parameter(name) or "value_head" in name
        assert parameter.dtype == (torch.float32 if trained else torch.bfloat16)
        assert torch.equal(before[name], local_tensor(parameter)) != trained, name
