"""Installed packages, a computation on the device, and the speeds that limit all other measurements."""

from __future__ import annotations

import platform

import torch

from alphaapollo.utils.versions import find_version
from scripts.gpu_check.kit import Kit, relative

REQUIRED = ("torch", "transformers", "numpy", "pydantic", "safetensors")
OPTIONAL = ("vllm", "ray", "flash_attn", "peft", "liger_kernel", "triton")


def run(kit: Kit) -> None:
    kit.record("device", kit.device)
    kit.record("python", platform.python_version())
    versions = {name: find_version(name) for name in (*REQUIRED, *OPTIONAL)}
    for name, version in versions.items():
        kit.record(name, version or "none")
    absent = [name for name in REQUIRED if not versions[name]]
    assert not absent, f"not installed: {', '.join(absent)}"
    import alphaapollo.workers.policy  # noqa: F401

    if kit.on_gpu:
        properties = torch.cuda.get_device_properties(0)
        kit.record("device", properties.name)
        kit.record("cuda", torch.version.cuda)
        kit.record("gib", properties.total_memory / 2**30)
        kit.record("capability", f"{properties.major}.{properties.minor}")
        kit.record("nccl", ".".join(map(str, torch.cuda.nccl.version())))
    with kit.part("torch.nn.attention.varlen"):
        from torch.nn.attention.varlen import varlen_attn

        is_own = varlen_attn.__module__ == "torch.nn.attention.varlen"
        kit.record("varlen_attn", "of this torch" if is_own else "of an older torch, adapted")
    x = torch.randn(512, 512, dtype=torch.float64)
    product = x.to(kit.device, torch.float32) @ x.to(kit.device, torch.float32)
    assert relative(product.cpu(), x @ x) < 1e-3
    measure_limits(kit)


def measure_limits(kit: Kit) -> None:
    """Speed of a large matrix product in bfloat16, and of copies on the device and from page-locked memory."""
    width, elements = (8192, 2**30) if kit.on_gpu else (256, 2**20)
    a, b = (torch.randn(width, width, device=kit.device).bfloat16() for _ in range(2))
    kit.record("matmul_tflops", 2 * width**3 / kit.time(lambda: a @ b) / 1e12)
    source = torch.ones(elements, dtype=torch.uint8, device=kit.device)
    target = torch.empty_like(source)
    kit.record("copy_gb_per_s", 2 * elements / kit.time(lambda: target.copy_(source)) / 1e9)
    host = torch.empty(elements, dtype=torch.uint8, pin_memory=kit.on_gpu)
    kit.record("to_host_gb_per_s", elements / kit.time(lambda: host.copy_(source, non_blocking=True)) / 1e9)
    kit.record("from_host_gb_per_s", elements / kit.time(lambda: target.copy_(host, non_blocking=True)) / 1e9)
