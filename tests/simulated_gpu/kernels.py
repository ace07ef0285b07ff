"""The digest's kernel, without a GPU: run by Triton's interpreter, or compiled for an H100.

TRITON_INTERPRET=1 python -m tests.simulated_gpu.kernels        # prints [digest of the kernel, digest of torch], ...
python -m tests.simulated_gpu.kernels                           # prints the bytes of the compiled kernel
"""

from __future__ import annotations

import json
import os

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from alphaapollo.engines.weight_sync import digest, digest_kernel

HASH = (digest._MULTIPLIERS, digest._SHIFTS)


def interpret() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    special = torch.tensor([float("inf"), float("nan"), 1e-40, -0.0])
    cases = [torch.randn(300, 50, generator=generator), special, torch.zeros(5), torch.empty(0)]
    cases += [torch.randn(2 * digest_kernel.BLOCK + 1, generator=generator).to(torch.bfloat16)]
    return [
        [int(digest_kernel.sum_hashes_on_gpu(case, *HASH)) % digest.MODULUS, digest.compute_joint_digest([case])]
        for case in cases
    ]


def compile_for_h100() -> int:
    names = ("first_multiplier", "second_multiplier", "first_shift", "second_shift", "BLOCK")
    constants = dict(zip(names, (*HASH[0], *HASH[1], digest_kernel.BLOCK), strict=True))
    arguments = {"values": "*bf16", "total": "*i64", "length": "i64"}
    source = ASTSource(digest_kernel._add_hashes, arguments, constants)
    return len(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"])


if __name__ == "__main__":
    print(json.dumps(interpret() if os.environ.get("TRITON_INTERPRET") else compile_for_h100()))
