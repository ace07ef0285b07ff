"""Settings of torch's allocator while weights are sent over CUDA IPC."""

from __future__ import annotations

import pytest
import torch

from alphaapollo.weight_sync.vllm_transfer import without_expandable_segments


@pytest.mark.parametrize(
    ("configured", "settings"),
    [
        (
            "max_split_size_mb:64,expandable_segments:True",
            ["max_split_size_mb:64,expandable_segments:False", "max_split_size_mb:64,expandable_segments:True"],
        ),
        ("expandable_segments:False", []),
        ("max_split_size_mb:64", []),
        ("", []),
    ],
)
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
