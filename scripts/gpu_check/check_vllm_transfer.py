"""vLLM on the training GPU: weights through CUDA IPC, memory released by sleep, equal digests and log-probs. Runs the
tests of one GPU in tests/gpu/test_weight_transfer.py."""

from __future__ import annotations

import subprocess
import sys
import time

from scripts.checks import ROOT, last_line
from scripts.gpu_check.kit import Kit, need

TEST = "tests/gpu/test_weight_transfer.py::test_cuda_ipc_on_a_shared_gpu"
CASES = ("one_bucket", "several_buckets", "graphs", "moe")


def run(kit: Kit) -> None:
    kit.need_gpu("CUDA IPC")
    need("vllm", "pytest")
    for case in CASES:
        with kit.part(case):
            start = time.perf_counter()
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"{TEST}[{case}]"]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            print(done.stdout, done.stderr, sep="\n")
            assert done.returncode == 0 and "1 passed" in done.stdout, last_line(done.stdout)
            kit.record(f"{case} seconds", time.perf_counter() - start)
