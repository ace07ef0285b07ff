"""Write the metrics of a run to metrics.jsonl, and send metrics and samples to the trackers that trainer.logger lists.

A tracker runs in a thread of its own, so that a slow or failing one neither delays nor stops the run.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alphaapollo.runs.metrics_file import JsonlTracker
from alphaapollo.runs.rollout_log import format_trajectory_lines
from alphaapollo.types import JsonObject, TrajectoryGroup
from alphaapollo.utils.redaction import redact

if TYPE_CHECKING:
    from pandas import DataFrame

CLOSE_SECONDS = 30.0  # time for the trackers to send what is left at the end of a run
MAX_SAMPLES = 32  # of a validation
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
        self._others = [BackgroundTracker(name, run, notice) for name in trainer["logger"] if name != "console"]

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._file.log(step, metrics)
        sent = dict(metrics)
        for other in self._others:
            other.put((step, lambda backend: backend.log(step, sent)))

    def log_samples(self, step: int, groups: Sequence[TrajectoryGroup], suffix: str = "") -> None:
        """Send the first samples of a validation to the trackers, as the table `val/samples<suffix>`."""
        name, first = f"val/samples{suffix}", groups[:MAX_SAMPLES]
        for other in self._others:
            other.put((step, lambda backend: backend.log_samples(step, name, make_sample_table(step, first))))

    def close(self) -> None:
        """Wait until the trackers have sent everything, but not longer than CLOSE_SECONDS."""
        self._file.close()
        deadline = time.monotonic() + CLOSE_SECONDS
        for other in self._others:
            other.put(None)
        for other in self._others:
            other.wait(deadline)


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
            backend = BACKENDS[self.name](self._run)
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


LOGINS: dict[str, Callable[[Any], Any]] = {  # trackers that upload to their server -> function that returns the login
    "wandb": lambda wandb: wandb.login(prompt=False, verify=False),
    "swanlab": lambda swanlab: swanlab.Settings().api_key,
}


def check_trackers(names: Sequence[str]) -> None:
    """Raise ValueError if a package that trainer.logger needs cannot be imported, or if its login is missing."""
    for name in (name for name in names if name != "console"):
        try:
            package = importlib.import_module("torch.utils.tensorboard" if name == "tensorboard" else name)
        except ImportError as error:
            raise ValueError(
                f"trainer.logger has {name}, but the package {name} cannot be imported ({error}). "
                f"Run pip install -e '.[{name}]' in the clone, or remove {name} from trainer.logger."
            ) from None
        variable = f"{name.upper()}_MODE"
        if name in LOGINS and os.environ.get(variable, "online") in ("online", "cloud") and not LOGINS[name](package):
            raise ValueError(
                f"trainer.logger has {name}, but you are not logged in. Run `{name} login`, set {variable}=offline to "
                f"write to the run's folder, or remove {name} from trainer.logger."
            )


def start_tensorboard(run: TrackerSettings) -> Backend:
    """Start event files for `tensorboard --logdir`."""
    from torch.utils.tensorboard import SummaryWriter

    # purge_step: tensorboard hides steps that were logged after the checkpoint
    purged = run.resumed_step + 1 if run.resumed_step else None
    writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=purged)

    def log(step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def log_samples(step: int, name: str, samples: DataFrame) -> None:
        import pandas as pd

        with pd.option_context("display.max_colwidth", None):  # complete texts
            writer.add_text(name, samples.to_html(index=False), step)

    return Backend(log, log_samples, writer.close)


def start_mlflow(run: TrackerSettings) -> Backend:
    """Start or continue a run of MLflow, on the server of MLFLOW_TRACKING_URI or in ./mlflow.db."""
    import mlflow
    import pandas as pd

    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    mlflow.set_experiment(run.project)
    name = f"attributes.run_name = '{run.experiment}'"
    earlier = mlflow.search_runs(filter_string=name, output_format="list") if run.resumed_step else []
    mlflow.start_run(earlier[0].info.run_id if earlier else None, run_name=run.experiment)
    if not earlier:
        mlflow.log_params(pd.json_normalize(run.config).iloc[0].to_dict())

    def log(step: int, metrics: dict[str, float]) -> None:  # val/pass@4 is not allowed
        mlflow.log_metrics({re.sub(r"[^\w\-. /]", "_", name): value for name, value in metrics.items()}, step=step)

    return Backend(log, lambda step, name, samples: mlflow.log_table(samples, f"{name}.json"), mlflow.end_run)


def make_run_backend(package_run: Any, make_table: Callable[[DataFrame], Any], end: Callable[[], object]) -> Backend:
    """Make the backend of a package with the interface of wandb."""
    return Backend(
        lambda step, metrics: package_run.log(metrics, step=step),
        lambda step, name, samples: package_run.log({name: make_table(samples)}, step=step),
        end,
    )


def start_wandb(run: TrackerSettings) -> Backend:
    """Start Weights & Biases. All starts of a run are in the wandb group `experiment`."""
    import wandb

    name, folder = run.experiment, str(run.folder)
    package_run = wandb.init(project=run.project, name=name, group=name, dir=folder, config=run.config)

    def end() -> None:
        package_run.finish()
        wandb.teardown()  # wandb would do it at the end of the program, when the run's processes have been killed

    return make_run_backend(package_run, lambda samples: wandb.Table(dataframe=samples), end)


def start_trackio(run: TrackerSettings) -> Backend:
    """Start Trackio; `trackio show` opens its dashboard."""
    import trackio

    resume = "allow" if run.resumed_step else "never"
    package_run = trackio.init(run.project, name=run.experiment, config=run.config, resume=resume, embed=False)
    return make_run_backend(package_run, lambda samples: trackio.Table(dataframe=samples), package_run.finish)


def start_swanlab(run: TrackerSettings) -> Backend:
    """Start SwanLab; with SWANLAB_MODE=offline, in the folder swanlog of the run."""
    import swanlab

    folder = run.folder / "swanlog"
    earlier = sorted(folder.glob("run-*")) if run.resumed_step else []  # run-<time>-<id>
    resumed = {"id": earlier[-1].name.rpartition("-")[2], "resume": "allow"} if earlier else {}
    package_run = swanlab.init(
        project=run.project, name=run.experiment, config=run.config, log_dir=str(folder), **resumed
    )

    def make_table(samples: DataFrame) -> Any:
        return swanlab.echarts.Table().add([*samples.columns], samples.values.tolist())

    return make_run_backend(package_run, make_table, package_run.finish)


BACKENDS: dict[str, Callable[[TrackerSettings], Backend]] = {
    "tensorboard": start_tensorboard,
    "wandb": start_wandb,
    "mlflow": start_mlflow,
    "trackio": start_trackio,
    "swanlab": start_swanlab,
}
