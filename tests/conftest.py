"""Settings of all tests: few threads, no network, markers by folder, distribution over processes."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# Set before any test module imports torch. With few cores, more threads are slower, especially if several processes
# share the cores.
for name, value in {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "offline",
    "SWANLAB_MODE": "offline",
    "RAY_worker_niceness": "0",  # with Ray's 15, workers starve beside other tests
}.items():
    os.environ.setdefault(name, value)


# No deadline per example, because machines may be busy; pytest's timeouts still apply. Examples are the same in every
# run. tests.fuzz.check and tests.invariance.check draw new ones.
hypothesis.settings.register_profile("tests", deadline=None, derandomize=True)
hypothesis.settings.load_profile("tests")

HERE = Path(__file__).parent
DURATIONS = HERE / "durations.json"  # {test: seconds} of the slow tests, recorded by `make durations`
RECORDED_SECONDS = 1.0  # faster tests are not recorded
STACK = ("loop", "gpu")  # folders of tests that start processes for themselves
CORE = (  # `make test` runs these folders and files, and the tests of tests/loop that are marked `core`
    "golden",
    *(f"unit/{name}" for name in ("algorithms", "config", "data", "environments", "finetuning", "rewards")),
    *(f"unit/{name}" for name in ("metrics", "session", "trainer")),
    "unit/tools/test_sandbox.py",
    "plugins/verify/test_reference_and_algorithms.py",
    "plugins/verify/test_reference_golden.py",
    "plugins/viewer/test_pages.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-durations", action="store_true", help=f"write {DURATIONS.name}")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import other tests for `make test`."""
    if config.option.markexpr != "core" or not collection_path.is_relative_to(HERE):
        return None
    chosen = [HERE / name for name in (*CORE, "loop")]
    near = any(collection_path.is_relative_to(one) or one.is_relative_to(collection_path) for one in chosen)
    return None if near else True


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without garbage collection, in four fifths of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests/loop with `loop`, tests/gpu with `gpu` and CORE with `core`. Skip tests/gpu without a CUDA device."""
    core = {path: any(path.is_relative_to(HERE / name) for name in CORE) for path in {item.path for item in items}}
    for item in items:
        if (folder := folder_of(item)) in STACK:
            item.add_marker(folder)
        if core[item.path]:
            item.add_marker("core")
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items:
        import torch

        if not torch.cuda.is_available():
            for item in gpu_items:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
    if hasattr(config, "workerinput"):  # files that may take long first, so that no process has one at the end
        sizes = {path: path.stat().st_size for path in {item.path for item in items}}
        items.sort(key=lambda item: (folder_of(item) not in STACK, -sizes[item.path], item.path))


def folder_of(item: pytest.Item) -> str:
    """Folder of tests/ that a test belongs to: `loop` also for tests/plugins/NAME/loop."""
    first, *others = item.path.relative_to(HERE).parts
    return "loop" if first == "plugins" and "loop" in others else first


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With several processes (`-n 2`), the tests of a file stay together in order, and all GPU tests do. The pages of
    the documentation are three parts."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file, _, test = nodeid.partition("::")
            if "test_documentation" in file:
                return file + next((part for part in ("[docs/algorithms/", "[docs/") if part in test), "")
            return "gpu" if Path(file).parts[1] == "gpu" else file

    config.option.loadscopereorder = False
    return ByFile(config, log)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the result of the core tests, which is the result of `make test` if other tests run, too."""
    counts, seconds = Counter[str](), 0.0
    for outcome, reports in terminalreporter.stats.items():
        core = [one for one in reports if isinstance(one, pytest.TestReport) and "core" in one.keywords]
        counts[outcome] = len(core)
        seconds += sum(report.duration for report in core)
    outcomes = ", ".join(f"{counts[name]} {name}" for name in ("passed", "failed", "error", "skipped") if counts[name])
    if outcomes:
        terminalreporter.write_line(f"core tests: {outcomes}, {seconds:.0f} s added up")
    if terminalreporter.config.option.record_durations:
        record_durations(report for reports in terminalreporter.stats.values() for report in reports)


def record_durations(reports: Iterable[Any]) -> None:
    """Write DURATIONS: the seconds of each slow test, with its set-up and tear-down."""
    seconds = Counter[str]()
    for report in reports:
        if isinstance(report, pytest.TestReport):
            seconds[report.nodeid] += report.duration
    slow = {name: round(value, 1) for name, value in sorted(seconds.items()) if value >= RECORDED_SECONDS}
    DURATIONS.write_text(json.dumps(slow, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


@pytest.fixture(scope="module", autouse=True)
def freeze_garbage_collection() -> None:
    """Exclude existing objects from garbage collection, which takes a second with torch and vLLM imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def end_stack_after_complete_runs(request: pytest.FixtureRequest) -> None:
    """End the process that complete runs share (tests/loop/stack.py) before other tests: it keeps engines in memory,
    and the fork server that it was forked from cannot be stopped before it. A fork server of other tests does not
    preload the modules of the engines' server."""
    stack = sys.modules.get("tests.loop.stack")
    if stack and folder_of(request.node) not in STACK:
        stack.STACK.close()
    if folder_of(request.node) not in STACK:
        multiprocessing.set_forkserver_preload(["__main__"])


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # otherwise libraries report leaks at exit
