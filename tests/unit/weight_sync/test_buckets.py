"""Size and content of buckets of weights."""

from __future__ import annotations

import pytest
import torch

from alphaapollo.weight_sync import transport
from alphaapollo.weight_sync.transport import make_buckets


def test_buckets_are_cast_and_complete() -> None:
    tensors = {"a": torch.ones(4), "b": torch.ones(2, 3).t()}
    (part,) = make_buckets(tensors.items(), torch.bfloat16)
    assert list(part) == ["a", "b"] and all(
        one.dtype == torch.bfloat16 and one.is_contiguous() for one in part.values()
    )


def test_a_bucket_ends_with_the_tensor_that_reaches_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "BUCKET_BYTES", 8)  # two numbers
    parts = list(make_buckets(((str(index), torch.zeros(1)) for index in range(5)), torch.float32))
    assert [len(part) for part in parts] == [2, 2, 1]
