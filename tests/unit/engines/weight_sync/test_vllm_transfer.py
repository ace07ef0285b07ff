"""Settings of torch's allocator while weights are sent, and buckets as vLLM reads them: `metadata()` and iteration in
0.32, the property `metadata` and `iter_full()` later."""

from __future__ import annotations

import sys
from functools import cached_property
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

from alphaapollo.engines.weight_sync.transfer import without_expandable_segments
from alphaapollo.engines.weight_sync.vllm_transfer import make_weight_source

BUCKET = {"a": torch.ones(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}


class ParamMeta(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class Source32:
    """Base class of vLLM 0.32, which calls `metadata` and iterates."""

    def read(self: Any) -> tuple[list[ParamMeta], list[str]]:
        return self.metadata(), [name for name, _ in self]


class Source33:
    """Base class of vLLM 0.33, which rejects a method `metadata`."""

    def __init_subclass__(cls) -> None:
        assert isinstance(cls.__dict__["metadata"], cached_property)

    def iter_full(self) -> Any:
        raise NotImplementedError

    def read(self: Any) -> tuple[list[ParamMeta], list[str]]:
        assert type(self).iter_full is not Source33.iter_full
        return self.metadata, [name for name, _ in self.iter_full()]


@pytest.mark.parametrize("base", [Source32, Source33])
def test_both_releases_read_a_bucket(base: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    name = "vllm.distributed.weight_transfer.base"
    parts = name.split(".")
    for count in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:count]), ModuleType(parts[count - 1]))
    module: Any = ModuleType(name)
    module.WeightSource, module.ParamMeta = base, ParamMeta
    monkeypatch.setitem(sys.modules, name, module)
    source: Any = make_weight_source(BUCKET)
    metadata, names = source.read()
    assert metadata == [("a", torch.float32, (2, 3)), ("b", torch.bfloat16, (4,))] and names == ["a", "b"]


OFF, ON = (f"max_split_size_mb:64,expandable_segments:{value}" for value in (False, True))


@pytest.mark.parametrize(("configured", "settings"), [(ON, [OFF, ON]), (OFF, []), ("", [])])
@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_expandable_segments_are_off_while_weights_are_sent(
    monkeypatch: pytest.MonkeyPatch, name: str, configured: str, settings: list[str]
) -> None:
    made: list[str] = []
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", made.append)
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(name, configured)
    with pytest.raises(KeyError), without_expandable_segments():
        assert made == settings[:1]
        raise KeyError
    assert made == settings
