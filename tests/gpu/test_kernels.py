"""The digest's kernel and the attention of vision towers on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from alphaapollo.engines.weight_sync.digest import compute_joint_digest
from alphaapollo.models.vision_attention import attend_images


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_digest_agrees_with_the_cpu(dtype: torch.dtype) -> None:
    weights = torch.randn(1000, 777, device="cuda", dtype=dtype)
    parts = [weights[:10], weights[10:, :700], weights[10:, 700:]]  # not all are contiguous
    assert compute_joint_digest(parts) == compute_joint_digest([weights.cpu()])


def test_images_of_different_sizes_do_not_attend_to_each_other() -> None:
    lengths = [100, 28, 4, 60]
    tensors = [torch.randn(1, 4, sum(lengths), 80, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    bounds = torch.tensor([0, *lengths], device="cuda", dtype=torch.int32).cumsum(0, dtype=torch.int32)
    found, _ = attend_images(nn.Module(), *tensors, None, 80**-0.5, bounds, max(lengths))
    parts = zip(*(tensor.float().split(lengths, 2) for tensor in tensors), strict=True)
    expected = torch.cat([attend_images(nn.Module(), *part, None, 80**-0.5)[0] for part in parts], dim=1)
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=2e-2)
