"""Fine-tuning's memory: checkpointing where it is needed, refusals with the keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from alphaapollo.config.resolve import resolve_model
from alphaapollo.config.schema import SftConfig
from alphaapollo.launch.memory.finetuning import MemoryRequest, find_micro_batch_shape, fit_finetuning_to_memory

PUBLISHED = Path(__file__).resolve().parents[3] / "scripts" / "published_models"
GIB = 2**30
LONG = MemoryRequest(16_384)
WITH_REFERENCE = MemoryRequest(16_384, needs_reference=True)


def on_ranks(ranks: int, **sections: Any) -> SftConfig:
    return SftConfig.model_validate({"model": {"path": "m"}, "trainer": {"n_gpus_per_node": ranks}} | sections)


def fitted(name: str, ranks: int, gib: int, memory_request: MemoryRequest = LONG, **model: object):
    config = on_ranks(ranks, model={"path": str(PUBLISHED / name)} | model)
    model, _, plan = fit_finetuning_to_memory(
        config, resolve_model(config.model, "cuda"), "cuda", memory_request, gib * GIB
    )
    return model, plan


def test_gradient_checkpointing_is_enabled_if_needed():
    assert fitted("qwen2.5-0.5b", 8, 80)[0].enable_gradient_checkpointing is False
    model, plan = fitted("qwen2.5-7b", 8, 80)
    assert model.enable_gradient_checkpointing is True and plan.problem == ""


def test_plan_that_cannot_fit_names_keys_that_help():
    warning = fitted("qwen2.5-7b", 8, 80, enable_gradient_checkpointing=False)[1].warning
    assert "on a GPU at its peak" in warning and "model.enable_gradient_checkpointing=true, " in warning
    assert "fsdp_config.offload_policy=true" in fitted("qwen2.5-7b", 1, 80)[1].problem
    assert fitted("qwen2.5-7b", 1, 80, lora_rank=16)[1].problem == ""


@pytest.mark.parametrize(
    ("ranks", "memory_request", "shape"),
    [
        (1, MemoryRequest(2048), (8, 2048)),  # the budget of 16384
        (1, MemoryRequest(100), (32, 100)),  # a step's 32 examples
        (32, MemoryRequest(20_000), (1, 20_000)),  # one longer than the budget
        (1, MemoryRequest(2048, rows_per_example=2), (8, 2048)),  # four pairs
        (1, MemoryRequest(10_000, rows_per_example=2), (2, 10_000)),  # a pair stays together
    ],
)
def test_largest_micro_batch(ranks: int, memory_request: MemoryRequest, shape: tuple[int, int]):
    assert find_micro_batch_shape(on_ranks(ranks), memory_request, 16_384) == shape


def test_reference_and_checkpoint_copies_are_counted():
    """A copy of a checkpoint is 12 bytes a parameter, shared by the ranks; in all as many on the one node."""
    model, alone = fitted("qwen2.5-0.5b", 8, 80)
    _, beside = fitted("qwen2.5-0.5b", 8, 80, WITH_REFERENCE)
    frozen = beside.peak[1].frozen_models
    assert alone.peak[1].frozen_models == 0 < frozen and beside.peak[1].total == alone.peak[1].total + frozen
    assert fitted("qwen2.5-0.5b", 8, 80, WITH_REFERENCE, lora_rank=4)[1].peak[1].frozen_models == 0
    trainer = {"n_gpus_per_node": 8, "save_freq": 5}
    config = on_ranks(8, model={"path": str(PUBLISHED / "qwen2.5-0.5b")}, trainer=trainer)
    plans = [
        fit_finetuning_to_memory(config, model, "cuda", MemoryRequest(2048), 80 * GIB, host * GIB)[2]
        for host in (64, 4)
    ]
    assert plans[0].checkpoint_copy_bytes == pytest.approx(6 * frozen * 8, rel=1e-3)
    assert [plan.saves_in_background for plan in plans] == [True, False]


def test_kv_cache_of_answers_is_counted():
    """Qwen2.5 0.5B: 2 x 24 layers x 2 heads x 64 bfloat16 numbers a token."""
    few, many = (MemoryRequest(1024, sampling_shape=(count, 512, 512)) for count in (4, 4096))
    plan = fitted("qwen2.5-0.5b", 1, 80, few)[1]
    assert plan.usage_by_phase["answers"].kv_cache == 2 * 24 * 2 * 64 * 2 * 4 * 1024 and plan.problem == ""
    warning = fitted("qwen2.5-0.5b", 1, 80, many)[1].warning
    assert "at its peak (answers: " in warning and "Lower rollout.max_num_seqs" in warning


def test_smaller_micro_batches_come_before_gradient_checkpointing():
    config = on_ranks(2, model={"path": str(PUBLISHED / "qwen2.5-1.5b")})
    resolved = resolve_model(config.model, "cuda")
    for gib, expected in ((80, (False, 16_384)), (32, (False, 4096)), (22, (True, 16_384))):
        model, tokens, plan = fit_finetuning_to_memory(config, resolved, "cuda", MemoryRequest(2048), gib * GIB)
        assert (model.enable_gradient_checkpointing, tokens) == expected and plan.has_headroom
