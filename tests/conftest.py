"""What holds for all tests: few threads, nothing from the network, markers by folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before any test module imports torch. On a machine with few cores more threads are slower, and much slower where
# several processes share them.
for name, value in {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "offline",
}.items():
    os.environ.setdefault(name, value)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """tests/loop is marked loop; tests/gpu is marked gpu, and skipped without a CUDA device."""
    for item in items:
        folder = Path(item.path).relative_to(Path(__file__).parent).parts[0]
        if folder in ("loop", "gpu"):
            item.add_marker(folder)
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items:
        import torch

        if not torch.cuda.is_available():
            for item in gpu_items:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
