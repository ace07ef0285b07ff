"""Size, content and order of buckets of weights."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from alphaapollo.weight_sync import shared_memory
from alphaapollo.weight_sync.shared_memory import make_buckets, prefetch_buckets


def test_buckets_are_cast_and_complete() -> None:
    tensors = {"a": torch.ones(4), "b": torch.ones(2, 3).t()}
    (part,) = make_buckets(tensors.items(), torch.bfloat16)
    assert list(part) == ["a", "b"] and all(
        one.dtype == torch.bfloat16 and one.is_contiguous() for one in part.values()
    )


def test_a_bucket_ends_with_the_tensor_that_reaches_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "BUCKET_BYTES", 8)  # two numbers
    parts = list(make_buckets(((str(index), torch.zeros(1)) for index in range(5)), torch.float32))
    assert [len(part) for part in parts] == [2, 2, 1]


def test_next_bucket_is_gathered_while_one_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Stream:
        numbers = itertools.count(1)

        def wait_stream(self, other: Any) -> None:
            calls.append(f"after {other}")

        def record_event(self) -> Any:
            number = next(self.numbers)
            return SimpleNamespace(synchronize=lambda: calls.append(f"whole {number}"))

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the step")
    monkeypatch.setattr(shared_memory, "BUCKET_BYTES", 1)

    def gather() -> Iterator[tuple[str, torch.Tensor]]:
        for number in (1, 2, 3):
            calls.append(f"gather {number}")
            yield str(number), torch.ones(1)

    for part in prefetch_buckets(make_buckets(gather(), torch.float32)):
        calls.append(f"send {' '.join(part)}")
    assert calls == [
        "after the step",
        *("gather 1", "gather 2", "whole 1", "send 1"),
        *("gather 3", "whole 2", "send 2"),
        *("whole 3", "send 3"),
    ]
