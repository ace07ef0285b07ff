"""Installed packages, and a computation on the device."""

from __future__ import annotations

import platform
from typing import Any

from alphaapollo.utils.versions import find_version
from scripts.gpu_check.kit import Kit, relative

REQUIRED = ("torch", "transformers", "numpy", "pydantic", "safetensors")
OPTIONAL = ("vllm", "ray", "flash_attn", "peft")


def run(kit: Kit) -> dict[str, Any]:
    import torch

    figures: dict[str, Any] = {"device": kit.device, "python": platform.python_version()}
    for name in (*REQUIRED, *OPTIONAL):
        figures[name] = find_version(name) or "none"
    absent = [name for name in REQUIRED if figures[name] == "none"]
    assert not absent, f"not installed: {', '.join(absent)}"
    import alphaapollo.workers.policy  # noqa: F401

    if kit.on_gpu:
        properties = torch.cuda.get_device_properties(0)
        figures |= {"device": properties.name, "cuda": torch.version.cuda, "gib": properties.total_memory / 2**30}
        figures |= {"capability": f"{properties.major}.{properties.minor}", "nccl": str(torch.cuda.nccl.version())}
    x = torch.randn(512, 512, dtype=torch.float64)
    product = x.to(kit.device, torch.float32) @ x.to(kit.device, torch.float32)
    assert relative(product.cpu(), x @ x) < 1e-3
    return figures
