"""Order in which buckets are gathered and sent, with a recording stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from alphaapollo.weight_sync import buckets
from alphaapollo.weight_sync.buckets import Bucket, make_buckets, prefetch_buckets


def test_buckets_are_cast_and_complete() -> None:
    tensors = {"a": torch.ones(4), "b": torch.ones(2, 3).t()}
    (part,) = make_buckets(tensors.items(), torch.bfloat16)
    assert list(part) == ["a", "b"] and all(
        one.dtype == torch.bfloat16 and one.is_contiguous() for one in part.values()
    )


def test_next_bucket_is_gathered_while_one_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Event:
        def __init__(self, number: int):
            self.number = number

        def synchronize(self) -> None:
            calls.append(f"whole {self.number}")

    class Stream:
        events = 0

        def wait_stream(self, other: Any) -> None:
            calls.append(f"after {other}")

        def record_event(self) -> Event:
            self.events += 1
            return Event(self.events)

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        yield

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the step")
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1)

    def gather() -> Iterator[tuple[str, torch.Tensor]]:
        for number in (1, 2, 3):
            calls.append(f"gather {number}")
            yield str(number), torch.ones(1)

    sent: list[Bucket] = []
    for part in prefetch_buckets(make_buckets(gather(), torch.float32)):
        calls.append(f"send {' '.join(part)}")
        sent.append(part)
    assert len(sent) == 3
    assert calls == [
        "after the step",
        *("gather 1", "gather 2", "whole 1", "send 1"),
        *("gather 3", "whole 2", "send 2"),
        *("whole 3", "send 3"),
    ]


def test_buckets_of_large_models_are_larger(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 4)  # one number
    parts = list(make_buckets(((str(index), torch.zeros(1)) for index in range(60)), torch.float32))
    assert [len(part) for part in parts] == [1] * 16 + [2] * 16 + [4] * 3
    for numbers, largest in ((1, 1), (16, 1), (18, 2), (48, 2), (60, 4)):
        assert buckets.get_largest_bucket_bytes(4 * numbers) == 4 * largest
