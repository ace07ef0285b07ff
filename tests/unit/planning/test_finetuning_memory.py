"""Fine-tuning's memory: checkpointing where it is needed, refusals with the keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from alphaapollo.config.resolve import resolve_model
from alphaapollo.config.schema import Model, SftConfig
from alphaapollo.planning.memory_fit import fit_to_memory
from alphaapollo.planning.memory_plan import MemoryPlan, MemoryRequest
from alphaapollo.planning.model_memory import load_model_sizes

PUBLISHED = Path(__file__).resolve().parents[3] / "scripts" / "published_models"
GIB = 2**30
LONG = MemoryRequest(16_384)


def on_ranks(ranks: int, **sections: Any) -> SftConfig:
    return SftConfig.model_validate({"model": {"path": "m"}, "trainer": {"n_gpus_per_node": ranks}} | sections)


def fit(config: SftConfig, request: MemoryRequest, gib: int, host: int = 0) -> tuple[Model, int, MemoryPlan]:
    may_choose = config.model.enable_gradient_checkpointing == "auto"
    config = config.model_copy(update={"model": resolve_model(config.model, "cuda")})
    config, plan = fit_to_memory(config, "cuda", gib * GIB, may_choose, host * GIB, request)
    return config.model, config.data.max_token_len_per_gpu, plan


def fitted(name: str, ranks: int, gib: int, memory_request: MemoryRequest = LONG, **model: object):
    model, _, plan = fit(on_ranks(ranks, model={"path": str(PUBLISHED / name)} | model), memory_request, gib)
    return model, plan


def test_plan_that_cannot_fit_names_keys_that_help():
    warning = fitted("qwen2.5-7b", 8, 80, enable_gradient_checkpointing=False)[1].warning
    assert "on a GPU of 80 GiB at its peak" in warning and "model.enable_gradient_checkpointing=true" in warning
    assert "fsdp_config.offload_policy=true" in fitted("qwen2.5-7b", 1, 80)[1].problem
    assert fitted("qwen2.5-7b", 1, 80, lora_rank=16)[1].problem == ""


def test_checkpoint_copies_are_counted():
    """A copy of a checkpoint is 12 bytes a parameter, shared by the ranks; in all as many on the one node."""
    assert fitted("qwen2.5-0.5b", 8, 80)[1].peak[1]["frozen models"] == 0
    for save_freq, factor in (("auto", 12), (5, 12), (-1, 0)):
        trainer = {"n_gpus_per_node": 8, "save_freq": save_freq}
        config = on_ranks(8, model={"path": str(PUBLISHED / "qwen2.5-0.5b")}, trainer=trainer)
        parameters = load_model_sizes(resolve_model(config.model, "cuda")).parameters
        plans = [fit(config, MemoryRequest(2048), 80, host)[2] for host in (64, 4)]
        assert plans[0].checkpoint_copy_bytes == pytest.approx(factor * parameters, rel=1e-3)
        assert [plan.saves_in_background for plan in plans] == [True, factor == 0]


def test_smaller_micro_batches_come_before_gradient_checkpointing():
    config = on_ranks(2, model={"path": str(PUBLISHED / "qwen2.5-1.5b")})
    for gib, expected in ((80, (False, 16_384)), (34, (False, 4096)), (22, (True, 16_384))):
        model, tokens, plan = fit(config, MemoryRequest(2048), gib)
        assert (model.enable_gradient_checkpointing, tokens, plan.describe_shortage()) == (*expected, "")
