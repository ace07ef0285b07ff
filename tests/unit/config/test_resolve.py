import importlib.util
from pathlib import Path

import pytest

from alphaapollo.config import resolve
from alphaapollo.config.resolve import (
    count_engine_gpus,
    count_engine_threads,
    count_engines,
    resolve_device,
    resolve_generation,
    resolve_model,
    resolve_rollout,
)
from alphaapollo.config.schema import GenerationConfig, Model, Rollout, Trainer
from alphaapollo.config.schema.base import Device


def dtypes(device: Device, model: Model, rollout: Rollout) -> tuple[str, str]:
    resolved = resolve_model(model, device)
    return resolved.dtype, resolve_rollout(rollout, resolved, device, 1).dtype


def test_device():
    assert (resolve_device("auto", 0), resolve_device("auto", 2), resolve_device("cpu", 2)) == ("cpu", "cuda", "cpu")


def test_dtypes_of_trainer_and_engine():
    assert dtypes("cpu", Model(), Rollout()) == ("float32", "float32")
    assert dtypes("cuda", Model(), Rollout()) == ("bfloat16", "bfloat16")
    assert dtypes("cpu", Model(dtype="bfloat16"), Rollout()) == ("bfloat16", "bfloat16")
    assert dtypes("cuda", Model(dtype="bfloat16"), Rollout(dtype="float32")) == ("bfloat16", "float32")
    assert resolve_rollout(Rollout(), Model(), "cpu", 1).dtype == "float32"  # engines without a trainer


@pytest.mark.parametrize(
    ("flags", "fastest"), [("avx2 avx512f", "float32"), ("avx512_bf16", "bfloat16"), ("amx_bf16", "bfloat16")]
)
def test_fastest_dtype_depends_on_the_instructions_of_the_cpu(
    flags: str, fastest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(resolve, "CPU_INFO", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text(f"flags : {flags} sse\n")
    assert resolve_model(Model(dtype="fastest"), "cpu").dtype == fastest
    assert resolve_rollout(Rollout(dtype="fastest"), Model(), "cpu", 1).dtype == fastest
    assert resolve_model(Model(dtype="fastest"), "cuda").dtype == "bfloat16"


def test_engines_fill_the_training_gpus():
    assert count_engines(Rollout(tensor_model_parallel_size=2), "cuda", 8) == 4
    assert count_engines(Rollout(tensor_model_parallel_size=2), "cpu", 8) == count_engines(Rollout(), "cpu", 4) == 1
    assert count_engines(Rollout(tensor_model_parallel_size=4), "cuda", 2) == 1
    assert count_engines(Rollout(num_engines=3), "cuda", 8) == 3


def test_nodes_for_engines_have_engines_that_share_no_gpus():
    trainer, rollout = Trainer(nnodes=4, n_gpus_per_node=8), Rollout(nnodes=2, tensor_model_parallel_size=4)
    assert (count_engine_gpus(Rollout(), trainer), count_engine_gpus(rollout, trainer)) == (32, 16)
    assert count_engine_gpus(rollout.model_copy(update={"n_gpus_per_node": 4}), trainer) == 8
    resolved = resolve_rollout(rollout, Model(), "cuda", 16)
    assert (resolved.num_engines, resolved.colocate) == (4, False)
    for number, engines in ((None, 3), (2, 2)):
        generation = {"trainer": {"nnodes": 3, "device": "cpu"}, "rollout": {"num_engines": number}}
        assert resolve_generation(GenerationConfig.model_validate(generation), 0, 4)[1].num_engines == engines
    on_cpus = resolve_rollout(Rollout(nnodes=2), Model(), "cpu", 16)
    assert on_cpus.num_engines == 2
    assert count_engine_threads(on_cpus, num_cores=6, nnodes=4, runs_during_training=True) == 6


def test_attention_by_device():
    for requested, device, kind in (("auto", "cpu", "padded"), ("sdpa", "cpu", "sdpa"), ("varlen", "cuda", "varlen")):
        assert resolve_model(Model(attention=requested), device).attention == kind
    assert resolve_model(Model(dtype="float32"), "cuda").attention == "sdpa"
    for requested, device, fact in (("varlen", "cuda", "bfloat16"), ("varlen", "cpu", "CPU"), ("flash", "cpu", "CPU")):
        with pytest.raises(ValueError, match=f"model.attention={requested} .*{fact}"):
            resolve_model(Model(attention=requested, dtype="float32"), device)


@pytest.mark.parametrize(
    ("found", "kind"),
    [
        ({"flash_attn"}, "varlen"),
        ({"flash_attn", "flash_attn_2_cuda"}, "flash"),
        ({"flash_attn", "flash_attn_2_cuda", "flash_attn_interface"}, "varlen"),
    ],
)
def test_flash_attn_4_is_not_taken_for_2_and_3_is_preferred(
    monkeypatch: pytest.MonkeyPatch, found: set[str], kind: str
):
    """Both install a module `flash_attn`; only version 2 has the required function."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in found else None)
    assert resolve_model(Model(), "cuda").attention == kind
    if "flash_attn_2_cuda" not in found:
        with pytest.raises(ValueError, match="pip install flash-attn"):
            resolve_model(Model(attention="flash"), "cuda")
