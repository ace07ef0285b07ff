"""Settings of all tests: few threads, no network, markers by folder, distribution over processes."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import hypothesis
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


# A busy machine makes a case slow, not wrong; pytest's own time limits stay. The cases are the same in every run: new
# ones are for tests.fuzz.check and tests.invariance.check.
hypothesis.settings.register_profile("tests", deadline=None, derandomize=True)
hypothesis.settings.load_profile("tests")

STACK = ("loop", "gpu")  # folders of tests that start processes for themselves


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """tests/loop is marked loop; tests/gpu is marked gpu, and skipped without a CUDA device."""
    for item in items:
        if (folder := folder_of(item)) in STACK:
            item.add_marker(folder)
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items:
        import torch

        if not torch.cuda.is_available():
            for item in gpu_items:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
    if hasattr(config, "workerinput"):  # the longest line first
        items.sort(key=lambda item: folder_of(item) not in STACK)


def folder_of(item: pytest.Item) -> str:
    return Path(item.path).relative_to(Path(__file__).parent).parts[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Side by side (`-n 2`) the tests of a file stay together in their order, and those that start the real stack run
    one after the other."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            return "stack" if Path(file).parts[1] in STACK else file

    config.option.loadscopereorder = False
    return ByFile(config, log)


@pytest.fixture(scope="module", autouse=True)
def freeze_what_is_there() -> None:
    """So that garbage is not looked for among all that torch and vLLM have made: a second, each time."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # or libraries complain at the end about what was never freed
