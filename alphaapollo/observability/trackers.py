"""Write the metrics of a run to metrics.jsonl, and to the trackers that trainer.logger lists.

A tracker runs in a thread of its own, so that a slow or failing one neither stops nor delays the run.
"""

from __future__ import annotations

import importlib.util
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from alphaapollo.observability.metrics_file import JsonlTracker

WANDB_FIX = (
    "Log in with `wandb login` or WANDB_API_KEY=..., set WANDB_MODE=offline to write to the run's folder, or remove "
    "wandb from trainer.logger."
)
CLOSE_SECONDS = 30.0  # time for a tracker to write what is left at the end of a run


@dataclass(frozen=True)
class TrackedRun:
    """A run, as trackers name it."""

    project: str
    experiment: str
    folder: Path
    config: Mapping[str, Any]  # as JSON types
    resumed_step: int  # iteration of the resumed checkpoint; 0 for a new run


class Backend(Protocol):
    """Tracker of a package. Each start of a run creates one; `__init__` takes a TrackedRun."""

    def log(self, step: int, metrics: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class Tracker:
    """Tracker of a run: writes metrics to metrics.jsonl and to the trackers of trainer.logger.

    Args:
        config: configuration of the run as JSON types.
        resumed_step: iteration of the resumed checkpoint; 0 for a new run. Metrics of later iterations are removed.
        notice: called with a message about damaged lines in metrics.jsonl, and about a tracker that failed.

    Raises ValueError if a package that trainer.logger needs is not installed, or a tracker does not start.
    """

    def __init__(
        self, config: Mapping[str, Any], folder: Path, resumed_step: int, notice: Callable[[str], None] = print
    ):
        trainer = config["trainer"]
        names = [name for name in trainer["logger"] if name != "console"]
        check_trackers(names)
        run = TrackedRun(trainer["project_name"], trainer["experiment_name"], folder, config, resumed_step)
        self._file = JsonlTracker(folder / "metrics.jsonl", resumed_step, notice)
        self._others = [BackgroundTracker(name, BACKENDS[name](run), notice) for name in names]

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._file.log(step, metrics)
        for other in self._others:
            other.log(step, metrics)

    def close(self) -> None:
        self._file.close()
        for other in self._others:
            other.close()


class BackgroundTracker:
    """Tracker that calls a backend in a thread. After an error of the backend, it gets no more metrics."""

    def __init__(self, name: str, backend: Backend, notice: Callable[[str], None]):
        self._name, self._backend, self._notice = name, backend, notice
        self._queue: queue.SimpleQueue[tuple[int, dict[str, float]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._queue.put((step, dict(metrics)))

    def close(self) -> None:
        """Wait until the backend has all metrics, but not longer than CLOSE_SECONDS."""
        self._queue.put(None)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._report(f"did not write all metrics within {CLOSE_SECONDS:g} s")

    def _write(self) -> None:
        try:
            while (entry := self._queue.get()) is not None:
                self._backend.log(*entry)
            self._backend.close()
        except Exception as error:  # noqa: BLE001 a tracker is not needed to train
            self._report(f"failed and gets no more metrics ({type(error).__name__}: {error})")

    def _report(self, problem: str) -> None:
        self._notice(f"the tracker {self._name} {problem}. metrics.jsonl in the run folder has all metrics.")


def check_trackers(names: Sequence[str]) -> None:
    """Raise ValueError if a tracker of trainer.logger needs a package that is not installed, or wandb has no login."""
    for name in names:
        if name != "console" and importlib.util.find_spec(name) is None:
            raise ValueError(
                f"trainer.logger has {name}, but the package {name} is not installed. "
                f"Run pip install -e '.[{name}]' in the clone, or remove {name} from trainer.logger."
            )
    if "wandb" in names and os.environ.get("WANDB_MODE", "online") == "online":
        import wandb

        if not wandb.login(prompt=False, verify=False):
            raise ValueError(f"trainer.logger has wandb, but you are not logged in. {WANDB_FIX}")


class TensorboardTracker:
    """Event files for `tensorboard --logdir`."""

    def __init__(self, run: TrackedRun):
        from torch.utils.tensorboard import SummaryWriter

        # purge_step: tensorboard hides steps that were logged after the checkpoint
        purged = run.resumed_step + 1 if run.resumed_step else None
        self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=purged)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """Weights & Biases. All starts of a run are in the wandb group `experiment`."""

    def __init__(self, run: TrackedRun):
        import wandb

        run.folder.mkdir(parents=True, exist_ok=True)
        names = {"project": run.project, "name": run.experiment, "group": run.experiment}
        try:
            self._run = wandb.init(**names, dir=str(run.folder), config=dict(run.config))
        except wandb.errors.UsageError as error:
            raise ValueError(f"trainer.logger has wandb, which failed: {error}. {WANDB_FIX}") from None

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def close(self) -> None:
        self._run.finish()


class MlflowTracker:
    """MLflow, on the server of MLFLOW_TRACKING_URI or in the file mlflow.db of the run folder."""

    def __init__(self, run: TrackedRun):
        import mlflow

        address = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.folder.absolute()}/mlflow.db"
        run.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._client = mlflow.MlflowClient(address)
            found = self._client.get_experiment_by_name(run.project)
            project = found.experiment_id if found else self._client.create_experiment(run.project)
            self._id = self._client.create_run(project, run_name=run.experiment).info.run_id
            self._client.log_dict(self._id, dict(run.config), "config.json")
        except mlflow.MlflowException as error:
            raise ValueError(f"trainer.logger has mlflow, which failed: {error}. Check MLFLOW_TRACKING_URI.") from None

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._client.log_metric(self._id, name, value, step=step)

    def close(self) -> None:
        self._client.set_terminated(self._id)


class TrackioTracker:
    """Trackio; `trackio show` opens its dashboard."""

    def __init__(self, run: TrackedRun):
        import trackio

        self._run = trackio.init(run.project, name=run.experiment, config=dict(run.config), embed=False)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def close(self) -> None:
        self._run.finish()


class SwanlabTracker:
    """SwanLab, in the folder swanlog of the run; SWANLAB_MODE=cloud uploads to its server."""

    def __init__(self, run: TrackedRun):
        import swanlab

        mode = os.environ.get("SWANLAB_MODE", "offline")
        names = {"project": run.project, "experiment_name": run.experiment}
        self._run = swanlab.init(**names, config=dict(run.config), logdir=str(run.folder / "swanlog"), mode=mode)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def close(self) -> None:
        self._run.finish()


BACKENDS: dict[str, Callable[[TrackedRun], Backend]] = {
    "tensorboard": TensorboardTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "trackio": TrackioTracker,
    "swanlab": SwanlabTracker,
}
