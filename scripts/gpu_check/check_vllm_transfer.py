"""vLLM on the training GPU: weights through CUDA IPC, memory released by sleep, equal digests and log-probs (runs the
test in tests/gpu)."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from scripts.checks import ROOT
from scripts.gpu_check.kit import Kit, need

TEST = "tests/gpu/test_weight_transfer.py::test_cuda_ipc_on_a_shared_gpu"


def run(kit: Kit) -> dict[str, Any]:
    kit.need_gpu("CUDA IPC")
    need("vllm", "pytest")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", TEST]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr, sep="\n")
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout.strip().splitlines()[-1]
    return {"test": "passed"}
