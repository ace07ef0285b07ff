from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from alphaapollo.engines.weight_sync import buckets as weight_buckets
from alphaapollo.engines.weight_sync import transfer
from alphaapollo.engines.weight_sync.digest import compute_joint_digest, format_digest
from alphaapollo.plugins.sglang import transfer as sglang_transfer
from alphaapollo.plugins.sglang.transfer import SglangTransferSender


def test_a_sender_over_cuda_ipc(monkeypatch: pytest.MonkeyPatch) -> None:
    """All buckets are one update. The handles are fake."""
    monkeypatch.setattr(transfer, "prefetch_buckets", lambda buckets: buckets)
    monkeypatch.setattr(weight_buckets, "BUCKET_BYTES", 8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-a"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(sglang_transfer, "reduce_tensor", lambda flat: (None, (flat.numel(),)))
    calls: list[tuple[str, ...]] = []
    sender = SglangTransferSender(lambda *call: calls.append(call), torch.float32, rank=0, transport="ipc")
    weights = {"a": torch.ones(2), "b": torch.ones(3)}
    update = sender.send(weights.items(), 1)
    assert update is not None and update.digest == format_digest(compute_joint_digest(weights.values()))
    buckets = [{"names": [name], "dtypes": ["float32"], "shapes": [[size]]} for name, size in (("a", 2), ("b", 3))]
    handles: list[dict[str, Any]] = [{"handles": {"GPU-a": (size,)}} for size in (8, 12)]
    sent = [("update_weights", bucket | handle) for bucket, handle in zip(buckets, handles, strict=True)]
    assert calls == [("start_weight_update",), *sent, ("finish_weight_update",)]
