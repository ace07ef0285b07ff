"""LoRA compared with peft on the plain Hugging Face model, and with one rank."""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from alphaapollo.config.schema import Critic, Model
from alphaapollo.models import sharding
from alphaapollo.models.lora import is_adapter_parameter
from alphaapollo.models.sharding import full_tensor, local_tensor
from alphaapollo.workers.companion import ReferenceModel
from alphaapollo.workers.critic import CriticWorker
from alphaapollo.workers.export import export_checkpoint
from alphaapollo.workers.policy import PolicyWorker
from alphaapollo.workers.process_group import RankPlacement
from tests.unit.tiny import run_ranks
from tests.unit.workers import training
from tests.unit.workers.training import Case

pytest.importorskip("peft")

FAST = {"optim": {"lr": 1e-2}}
FULL = FAST | {"entropy_coeff": 0.1, "use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": "full"}
TOKENS = torch.tensor([[5, 9, 3, 3, 40, 7, 8]])


@torch.no_grad()
def train_by_hand(model: nn.Module) -> None:
    """Set nonzero adapters that do not depend on the number of ranks: drawn by the parameter's name."""
    for name, parameter in model.named_parameters():
        if is_adapter_parameter(name):
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            value = torch.randn(parameter.shape, generator=generator) * 0.2
            assert isinstance(parameter, DTensor)
            placed = distribute_tensor(value, parameter.device_mesh, parameter.placements)
            parameter.to_local().copy_(placed.to_local())


def worker_of(case: Case, rank: int = 0, num_ranks: int = 1, address: str = "", **arguments: Any) -> PolicyWorker:
    worker = training.make_worker(case, rank, num_ranks, address, **arguments)
    train_by_hand(worker.policy)
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
    worker = worker_of(case, sender=recorder)
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


def gradients_and_weights(rank: int, num_ranks: int, address: str, case: Case) -> list[dict[str, np.ndarray]]:
    """Gradients of one step, and merged weights as the engine gets them."""
    recorder = training.Recorder()
    worker = worker_of(case, rank, num_ranks, address, sender=recorder)
    share, num_shares = case.share(rank, num_ranks)
    batch = training.make_batch(case, num_shares)
    worker.load_batch(batch.rank_batches[share])
    worker.send_weights(1)
    recorded = training.record_gradients(worker)
    worker.update(training.make_columns(case, batch, share))
    worker.close()
    return [recorded[0], {name: tensor.numpy() for name, tensor in recorder.sent.items()}]


def test_ranks_units_and_recomputation_change_nothing(model_folder):
    """Full KL, entropy and PPO; layers sharded separately or together; 3 ranks, which do not divide B; 2 ranks with
    sequence parallelism, or with a copy each and deferred reduction."""
    case = Case(str(model_folder("qwen3")), FULL, lora_rank=4, needs_reference=True)
    gradients, weights = gradients_and_weights(0, 1, "", case)
    others = [gradients_and_weights(0, 1, "", replace(case, checkpointing=True, min_unit=10**9))]
    assert all(is_adapter_parameter(name) for name in gradients)
    assert max(np.abs(gradient).max() for gradient in gradients.values()) > 1e-3
    many = [replace(case, max_tokens=40, checkpointing=True), replace(case, min_unit=10**9)]
    copies = FULL | {"fsdp_config": {"fsdp_size": 1, "sync_each_micro_batch": False}}
    pairs = [replace(case, sequence_parallel=2), replace(case, actor=copies, max_tokens=40)]
    for num_ranks, cases in ((3, many), (2, pairs)):
        for rank in run_ranks(training.call_for_each, num_ranks, gradients_and_weights, cases, timeout=200):
            others += rank
    for own, sent in others:
        training.assert_close(own, gradients)
        training.assert_close(sent, weights, rtol=1e-7)


def test_the_reference_is_the_base_model(start):
    worker, columns = start(actor=FULL, lora_rank=4, needs_reference=True)
    assert type(worker.find("reference")) is ReferenceModel
    train_by_hand(worker.policy)
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


def test_checkpoints_contain_only_the_adapter_and_resume_bit_for_bit(start, tmp_path: Path):
    fields = {"actor": FAST, "mini_batch_size": 5}
    worker, columns = start(lora_rank=4, **fields)
    worker.update(columns)
    worker.save(str(tmp_path / "saved"))
    worker.update(columns)

    from torch.distributed.checkpoint import FileSystemReader

    kept = FileSystemReader(tmp_path / "saved" / "model").read_metadata().state_dict_metadata
    tensors = [name for name in kept if not name.startswith("optimizer.param_groups")]
    assert tensors and all(is_adapter_parameter(f"{name}.") for name in tensors), tensors

    resumed, _ = start(lora_rank=4, arguments={"seed": 5}, **fields)
    resumed.load(str(tmp_path / "saved"))
    resumed.update(columns)
    training.assert_close(adapters(resumed.policy), adapters(worker.policy), atol=0, rtol=0)

    whole, _ = start(**fields)
    with pytest.raises(ValueError, match=f"{tmp_path}/saved cannot be read"):
        whole.load(str(tmp_path / "saved"))


def save_on_two(rank: int, num_ranks: int, address: str, case: Case, folder: str) -> list[float]:
    worker = worker_of(case, rank, num_ranks, address)
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


def test_the_critic_trains_its_adapter_and_its_head(model_folder, close_later, tmp_path: Path):
    sharding.MIN_UNIT = 0
    case = Case(str(model_folder("llama")))
    model = Model(path=case.folder, attention="padded", dtype="bfloat16", lora_rank=4)

    def make(seed: int) -> CriticWorker:
        return close_later(CriticWorker(model, Critic(**FAST), RankPlacement(0, 1, "", "cpu", 1), 10, seed))

    worker, batch = make(0), training.make_batch(case, 1)
    start = {name: local_tensor(p).clone() for name, p in worker.model.named_parameters()}
    worker.load_batch(batch.rank_batches[0])
    for _ in range(2):  # at the first step B is 0, and so is A's gradient
        worker.update(training.make_columns(case, batch, 0))
    for name, parameter in worker.model.named_parameters():
        trained = is_adapter_parameter(name) or "value_head" in name
        assert parameter.dtype == (torch.float32 if trained else torch.bfloat16)
        assert torch.equal(start[name], local_tensor(parameter)) != trained, name
    values = worker.compute_values()
    worker.save(str(tmp_path / "saved"))
    resumed = make(9)
    resumed.load(str(tmp_path / "saved"))
    resumed.load_batch(batch.rank_batches[0])
    np.testing.assert_array_equal(resumed.compute_values(), values)
