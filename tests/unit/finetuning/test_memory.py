"""Fine-tuning's memory: checkpointing where it is needed, refusals with the keys."""

from __future__ import annotations

from pathlib import Path

from alphaapollo.config.resolve import resolve_model
from alphaapollo.config.schema import Model, SftConfig
from alphaapollo.finetuning.memory import fit_sft, micro_batch

PUBLISHED = Path(__file__).resolve().parents[3] / "scripts" / "published_models"
GIB = 2**30


def fitted(name: str, ranks: int, gib: int, **model: object):
    config = SftConfig(model=Model(path=str(PUBLISHED / name), **model))  # type: ignore[arg-type]
    return fit_sft(config, resolve_model(config.model, "cuda"), "cuda", ranks, ranks, 16_384, gib * GIB)


def test_checkpointing_is_chosen_where_it_is_needed():
    assert fitted("qwen2.5-0.5b", 8, 80)[0].enable_gradient_checkpointing is False
    model, plan = fitted("qwen2.5-7b", 8, 80)
    assert model.enable_gradient_checkpointing is True and plan.problem == ""


def test_what_cannot_fit_is_refused_with_the_keys():
    assert fitted("qwen2.5-7b", 8, 80, enable_gradient_checkpointing=False)[1].problem.endswith(
        "Set model.enable_gradient_checkpointing=true."
    )
    assert "fsdp_config.offload_policy=true" in fitted("qwen2.5-7b", 1, 80)[1].problem
    assert fitted("qwen2.5-7b", 1, 80, lora_rank=16)[1].problem == ""


def test_the_largest_micro_batch():
    config = SftConfig(model=Model(path="m"))
    assert micro_batch(config, 1, 2048) == (8, 2048)  # the budget of 16384
    assert micro_batch(config, 1, 100) == (32, 100)  # a step's 32 examples
    assert micro_batch(config, 32, 20_000) == (1, 20_000)  # one longer than the budget
