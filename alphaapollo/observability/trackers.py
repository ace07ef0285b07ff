"""Write the metrics of a run to metrics.jsonl, and send metrics and samples to the trackers that trainer.logger lists.

A tracker runs in a thread of its own, so that a slow or failing one neither delays nor stops the run.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from alphaapollo.runs.metrics_file import JsonlTracker
from alphaapollo.runs.rollout_log import format_trajectory_lines
from alphaapollo.types import JsonObject, TrajectoryGroup
from alphaapollo.utils.plugins import load_plugin
from alphaapollo.utils.redaction import redact

if TYPE_CHECKING:
    from pandas import DataFrame

CLOSE_SECONDS = 30.0  # time for the trackers to send what is left at the end of a run
MAX_SAMPLES = 32  # maximum number of samples of a validation that are sent
SAMPLE_COLUMNS = ["step", "prompt", "text", "ground_truth", "reward", "outcome"]  # as in rollouts/


@dataclass(frozen=True)
class TrackerSettings:
    """Names, folder and configuration of a run, for trackers."""

    project: str
    experiment: str
    folder: Path
    config: JsonObject  # as JSON types
    resumed_step: int  # iteration of the resumed checkpoint; 0 for a new run


@dataclass(frozen=True)
class Backend:
    """Functions of a package that track one start of a run."""

    log: Callable[[int, dict[str, float]], object]  # (step, metrics)
    log_samples: Callable[[int, str, DataFrame], object]  # (step, name, table)
    close: Callable[[], object]


@dataclass(frozen=True)
class TrackerPackage:
    """Tracker of a package, for the group `trackers` of packages that extend alphaapollo (docs/plugins.md)."""

    start: Callable[[TrackerSettings], Backend]
    check: Callable[[], object]  # raises ValueError if the package or its login is missing


Entry = tuple[int, Callable[[Backend], object]]  # (iteration, call that sends its metrics or samples)


class Tracker:
    """Tracker of a run: writes metrics to metrics.jsonl, and sends metrics and samples to the trackers of
    trainer.logger.

    Args:
        config: configuration of the run as JSON types.
        resumed_step: iteration of the resumed checkpoint; 0 for a new run. Metrics of later iterations are removed.
        notice: called with a message about damaged lines in metrics.jsonl, and about a tracker that failed.

    Raises ValueError if a package or a login is missing (check_trackers).
    """

    def __init__(self, config: JsonObject, folder: Path, resumed_step: int, notice: Callable[[str], None] = print):
        trainer = config["trainer"]
        check_trackers(trainer["logger"])
        run = TrackerSettings(trainer["project_name"], trainer["experiment_name"], folder, dict(config), resumed_step)
        self._file = JsonlTracker(folder / "metrics.jsonl", resumed_step, notice)
        self._trackers = [BackgroundTracker(name, run, notice) for name in trainer["logger"] if name != "console"]

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._file.log(step, metrics)
        sent_metrics = dict(metrics)
        for tracker in self._trackers:
            tracker.put((step, lambda backend: backend.log(step, sent_metrics)))

    def log_samples(self, step: int, groups: Sequence[TrajectoryGroup], suffix: str = "") -> None:
        """Send the first samples of a validation to the trackers, as the table `val/samples<suffix>`."""
        name, first_groups = f"val/samples{suffix}", groups[:MAX_SAMPLES]
        for tracker in self._trackers:
            tracker.put((step, lambda backend: backend.log_samples(step, name, make_sample_table(step, first_groups))))

    def close(self) -> None:
        """Wait until the trackers have sent everything, but not longer than CLOSE_SECONDS."""
        self._file.close()
        deadline = time.monotonic() + CLOSE_SECONDS
        for tracker in self._trackers:
            tracker.put(None)
        for tracker in self._trackers:
            tracker.wait(deadline)


class BackgroundTracker(threading.Thread):
    """Thread that creates and calls the backend of a package. After an error, the package gets no more data."""

    def __init__(self, name: str, run: TrackerSettings, notice: Callable[[str], None]):
        super().__init__(name=name, daemon=True)
        self._queue: queue.SimpleQueue[Entry | None] = queue.SimpleQueue()
        self._run, self._notice, self._step = run, notice, run.resumed_step
        self.start()

    def put(self, entry: Entry | None) -> None:
        """Queue data for the package. None: there is no more."""
        if self.is_alive():
            self._queue.put(entry)

    def wait(self, deadline: float) -> None:
        """Wait until the package has everything. deadline: time of the monotonic clock."""
        self.join(max(0.0, deadline - time.monotonic()))
        if self.is_alive():
            self._report(f"did not end within {CLOSE_SECONDS:g} s")

    def run(self) -> None:
        try:
            backend = find_tracker(self.name).start(self._run)
            while (entry := self._queue.get()) is not None:
                self._step, call = entry
                call(backend)
            backend.close()
        except BaseException as error:  # noqa: BLE001 a run does not need its trackers; some packages exit
            self._report(f"failed ({type(error).__name__}: {error})")

    def _report(self, problem: str) -> None:
        notice, self._notice = self._notice, lambda _: None  # one message per tracker
        notice(
            f"the tracker {self.name} {redact(problem)}: data from step {self._step} on may be missing there. "
            f"{self._run.folder} has all metrics and samples."
        )


def make_sample_table(step: int, groups: Sequence[TrajectoryGroup]) -> DataFrame:
    """Return the first MAX_SAMPLES trajectories with the columns SAMPLE_COLUMNS, without secrets."""
    import pandas as pd

    samples = [json.loads(line) for line in islice(format_trajectory_lines(step, groups), MAX_SAMPLES)]
    for sample in samples:
        if isinstance(sample["prompt"], list):
            sample["prompt"] = "\n\n".join(message["content"] for message in sample["prompt"])
        for name in ("prompt", "text", "ground_truth"):
            text = "" if sample[name] is None else str(sample[name])
            sample[name] = text.encode("utf-8", "replace").decode()  # without lone surrogates
    return pd.DataFrame(samples, columns=SAMPLE_COLUMNS)


def find_tracker(name: str) -> TrackerPackage:
    """Import the tracker of a name in trainer.logger. Raises ValueError if its plug-in or package is missing."""
    package: TrackerPackage | None = load_plugin("trackers", name)
    if package is None:
        raise ValueError(f"trainer.logger has {name}: no installed package has this tracker. Install it.")
    return package


def check_trackers(names: Sequence[str]) -> None:
    """Raise ValueError if the package or the login of a tracker of trainer.logger is missing."""
    for name in names:
        if name != "console":
            find_tracker(name).check()
