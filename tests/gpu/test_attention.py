"""GPU attention kernels against padded attention, and a training worker in bfloat16."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from alphaapollo.batching.batch import Columns, Rows
from alphaapollo.config.resolve import has_flash_attn
from alphaapollo.config.schema import Model
from alphaapollo.models.load import load_causal_lm
from alphaapollo.models.micro_batch import MicroBatchBuilder
from alphaapollo.models.policy import PolicyModel
from tests.unit.models.test_attention_shared_prompts import draw_rows
from tests.unit.tiny import build_model, free_address, save_tokenizer, some_rows
from tests.unit.workers.training import Case, make_batch, make_columns, make_worker

KINDS = [
    "sdpa",
    "varlen",
    pytest.param("flash", marks=pytest.mark.skipif(not has_flash_attn(), reason="no flash-attn 2")),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Head size 64, which every kernel supports."""
    path = tmp_path_factory.mktemp("model")
    build_model("qwen3", head_dim=64).save_pretrained(path)
    save_tokenizer(path)
    return path


Computed = tuple[Tensor, list[Tensor]]  # log-probs and gradients


def compute(policy: PolicyModel, rows: Rows, padded: bool) -> Computed:
    policy.zero_grad()
    logprobs = policy(MicroBatchBuilder(padded, torch.device("cuda")).build(rows, range(len(rows))), 1.0).logprobs
    logprobs.sum().backward()
    return logprobs.detach().cpu(), [parameter.grad.float().cpu() for parameter in policy.parameters()]


def load(folder: object, attention: Any, **settings: Any) -> PolicyModel:
    model = load_causal_lm(Model(path=str(folder), **settings), attention)
    return PolicyModel(model.to(torch.device("cuda"), torch.bfloat16))


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_agree_with_padded_attention(folder: Path, kind: str):
    rows = Rows.from_rows(some_rows(6))
    check_near(*(compute(load(folder, own), rows, own == "padded") for own in ("padded", kind)))


def check_near(expected: Computed, ours: Computed) -> None:
    """Log-probs and gradients, within the rounding error of bfloat16."""
    assert (ours[0] - expected[0]).abs().mean() < 0.03
    for gradient, own_gradient in zip(expected[1], ours[1], strict=True):
        assert (own_gradient - gradient).norm() < 0.05 * gradient.norm() + 1e-3


@pytest.mark.parametrize("kind", ["padded", *KINDS])
def test_shared_prompts_are_the_plain_layout(folder: Path, kind: str):
    rows, policy = draw_rows(3, 12, 9), load(folder, kind)
    check_near(*(compute(policy, layout, kind == "padded") for layout in (replace(rows, shared_prompts=None), rows)))


KL = {"optim": {"lr": 1e-3}, "use_kl_loss": True, "kl_loss_type": "full"}
OFFLOADS = [{}, {"param_offload": True, "optimizer_offload": True}, {"offload_policy": True}]


@pytest.mark.parametrize("offloads", OFFLOADS, ids=["on_gpu", "between_phases", "by_fsdp"])
def test_worker_trains_and_resumes_on_a_gpu(folder: Path, tmp_path: Path, offloads: dict[str, bool]):
    ref = {"fsdp_config": {key: on for key, on in offloads.items() if key != "optimizer_offload"}}
    case = Case(str(folder), KL | {"fsdp_config": offloads}, "auto", needs_reference=True, ref=ref, checkpointing=True)
    case = replace(case, device="cuda", mini_batch_size=5, max_tokens=60)
    worker, batch = make_worker(case, 0, 1, free_address()), make_batch(case, 1)
    worker.load_batch(batch.rank_batches[0])
    before = worker.compute_log_probs()
    figures = worker.update(make_columns(case, batch, 0, old=False))
    assert figures["actor/grad_norm"] > 0
    on_gpu = torch.cuda.memory_allocated()
    worker.offload()
    if worker.actor.fsdp_config.param_offload:
        trained = sum(parameter.numel() for parameter in worker.policy.parameters())
        assert torch.cuda.memory_allocated() <= on_gpu - 3 * 4 * trained, "weights and moments are in host memory"
        assert all(copy._host.is_pinned() for copy in worker.state.parameter_offloader._copies.values())
    after = worker.compute_log_probs()
    assert np.abs(after - before).max() > 1e-3
    worker.save(str(tmp_path / "saved"))
    worker.update(make_columns(case, batch, 0, old=False))
    worker.load(str(tmp_path / "saved"))
    np.testing.assert_allclose(worker.compute_log_probs(), after, atol=1e-6)
    worker.export(str(tmp_path / "model"))
    assert worker.get_memory_metrics()["cuda_gib"] > 0
    worker.close()


def test_a_micro_batch_goes_up_without_waiting(folder: Path):
    """Copies are asynchronous from pinned memory. A blocking copy would raise."""
    rows, device = Rows.from_rows(some_rows(6)), torch.device("cuda")
    columns = Columns(advantages=np.ones(rows.response_offsets[-1]), loss_weights=np.ones(6))
    MicroBatchBuilder(False, device).build(rows, [0, 1], columns)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        micro = MicroBatchBuilder(False, device).build(rows, list(range(6)), columns)
        matrix = micro.to_matrix(micro.columns.advantages)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert matrix.sum().item() == rows.response_offsets[-1]
    assert micro.token_ids.flatten().tolist() == rows.token_ids.tolist()
