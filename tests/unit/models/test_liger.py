"""When Liger's kernels are used. tests/gpu/test_fused.py tests their results."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

from alphaapollo.config.resolve import resolve_model
from alphaapollo.config.schema import Model
from alphaapollo.config.schema.base import Device
from alphaapollo.models import load
from alphaapollo.planning.model_requirements import choose_kernels
from tests.unit.tiny import build_model, save_model

KEY, COMPILED, REQUIRED = "model.use_liger", {"use_torch_compile": True}, {"use_liger": True}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "liger_kernel" or find(name))


@pytest.mark.parametrize(
    ("model", "device", "chosen"),
    [
        ({}, "cuda", True),
        ({}, "cpu", False),
        ({"use_liger": False}, "cuda", False),
        (COMPILED, "cuda", False),
        ({"dtype": "float32"}, "cuda", False),
        ({"dtype": "float32"} | REQUIRED, "cuda", True),
        (REQUIRED, "cpu", f"{KEY}=auto"),
        (REQUIRED | COMPILED, "cuda", "torch_compile=true"),
    ],
)
@pytest.mark.usefixtures("installed")
def test_kernels_need_a_gpu_and_no_compilation_and_auto_half_precision(
    model: dict[str, Any], device: Device, chosen: bool | str
) -> None:
    if isinstance(chosen, bool):
        assert resolve_model(Model(**model), device).use_liger is chosen
    else:
        with pytest.raises(ValueError, match=rf"{KEY}=true.*{chosen}"):
            resolve_model(Model(**model), device)


def test_kernels_need_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert resolve_model(Model(), "cuda").use_liger is False
    with pytest.raises(ValueError, match=f"{KEY}=true.* liger-kernel"):
        resolve_model(Model(use_liger=True), "cuda")


@pytest.mark.usefixtures("installed")
def test_unsupported_architectures(tmp_path: Path) -> None:
    """An error before a worker starts if Liger is required, else the plain layers."""
    paths = [str(save_model(name, tmp_path / name)) for name in ("qwen3", "gemma2")]
    known, other = (Model(path=path, attention="sdpa") for path in paths)
    assert choose_kernels(resolve_model(known, "cuda"), known).use_liger is True
    assert choose_kernels(resolve_model(other, "cuda"), other).use_liger is False
    assert choose_kernels(resolve_model(other, "cpu"), other).use_liger is False
    with pytest.raises(ValueError, match=r"'gemma2'.* granite, llama"):
        fused = other.model_copy(update={"use_liger": True})
        choose_kernels(resolve_model(fused, "cuda"), fused)


@pytest.mark.parametrize("setting", [True, False, "auto"])
def test_kernels_are_applied_to_a_resolved_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: Any) -> None:
    fused: list[str] = []
    monkeypatch.setattr(load, "use_liger_kernels", lambda model, **_: fused.append(model.config.model_type))
    model = Model(path=str(save_model("qwen3", tmp_path)), use_liger=setting)
    load.load_causal_lm(model, "padded")
    assert fused == ["qwen3"] * (setting is True)


def test_all_passes_use_the_same_kernel_for_rotary_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations import liger

    monkeypatch.delenv("LIGER_KERNEL_IMPL_ROPE", raising=False)
    found: list[str] = []
    monkeypatch.setattr(liger, "apply_liger_kernel", lambda *_: found.append(os.environ["LIGER_KERNEL_IMPL_ROPE"]))
    load.use_liger_kernels(build_model("qwen3"))
    assert found == ["nvidia-triton"]
