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
from typing import TYPE_CHECKING, Any, Protocol

from alphaapollo.runs.rollout_log import format_trajectory_lines
from alphaapollo.runs.run_history import JsonlTracker
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


class Backend(Protocol):
    """Tracker of a package. Each start of a run creates one, see BACKENDS."""

    def log(self, step: int, metrics: dict[str, float]) -> None: ...

    def log_samples(self, step: int, name: str, samples: DataFrame) -> None: ...

    def close(self) -> None: ...


Entry = tuple[int, Callable[[Backend], None]]  # (iteration, call that sends its metrics or samples)


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
        for other in self._others:
            other.put(None)
        deadline = time.monotonic() + CLOSE_SECONDS
        for other in self._others:
            other.wait(deadline)


class BackgroundTracker:
    """Thread that creates and calls the tracker of a package. After an error, the package gets no more data."""

    def __init__(self, name: str, run: TrackerSettings, notice: Callable[[str], None]):
        self._name, self._run, self._notice = name, run, notice
        self._step = run.resumed_step  # iteration whose data the package is getting
        self._queue: queue.SimpleQueue[Entry | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, entry: Entry | None) -> None:
        """Queue data for the package. None: there is no more."""
        if self._thread.is_alive():
            self._queue.put(entry)

    def wait(self, deadline: float) -> None:
        """Wait until the package has everything. deadline: time of the monotonic clock."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._report(f"did not end within {CLOSE_SECONDS:g} s")

    def _send(self) -> None:
        try:
            backend = BACKENDS[self._name](self._run)
            while (entry := self._queue.get()) is not None:
                self._step, call = entry
                call(backend)
            backend.close()
        except BaseException as error:  # noqa: BLE001 a run does not need its trackers; some packages exit
            self._report(f"failed ({type(error).__name__}: {error})")

    def _report(self, problem: str) -> None:
        notice, self._notice = self._notice, lambda _: None  # one message per tracker
        notice(
            f"the tracker {self._name} {redact(problem)}: data from step {self._step} on may be missing there. "
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


class TensorboardTracker:
    """Event files for `tensorboard --logdir`."""

    def __init__(self, run: TrackerSettings):
        from torch.utils.tensorboard import SummaryWriter

        # purge_step: tensorboard hides steps that were logged after the checkpoint
        purged = run.resumed_step + 1 if run.resumed_step else None
        self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=purged)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_samples(self, step: int, name: str, samples: DataFrame) -> None:
        import pandas as pd

        with pd.option_context("display.max_colwidth", None):  # complete texts
            self._writer.add_text(name, samples.to_html(index=False), step)

    def close(self) -> None:
        self._writer.close()


class MlflowTracker:
    """MLflow, on the server of MLFLOW_TRACKING_URI or in mlflow.db of the working directory."""

    def __init__(self, run: TrackerSettings):
        import mlflow
        import pandas as pd

        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
        mlflow.set_experiment(run.project)
        name = f"attributes.run_name = '{run.experiment}'"
        earlier = mlflow.search_runs(filter_string=name, output_format="list") if run.resumed_step else []
        mlflow.start_run(earlier[0].info.run_id if earlier else None, run_name=run.experiment)
        if not earlier:
            mlflow.log_params(pd.json_normalize(run.config).iloc[0].to_dict())
        self._mlflow = mlflow

    def log(self, step: int, metrics: dict[str, float]) -> None:
        names = {name: re.sub(r"[^\w\-. /]", "_", name) for name in metrics}  # val/pass@4 is not allowed
        self._mlflow.log_metrics({names[name]: value for name, value in metrics.items()}, step=step)

    def log_samples(self, step: int, name: str, samples: DataFrame) -> None:
        self._mlflow.log_table(samples, f"{name}.json")

    def close(self) -> None:
        self._mlflow.end_run()


class RunTracker:
    """Tracker of a package with the interface of wandb."""

    def __init__(self, package_run: Any, make_table: Callable[[DataFrame], Any]):
        self._run, self._make_table = package_run, make_table

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def log_samples(self, step: int, name: str, samples: DataFrame) -> None:
        self._run.log({name: self._make_table(samples)}, step=step)

    def close(self) -> None:
        self._run.finish()


class WandbTracker(RunTracker):
    """Weights & Biases. All starts of a run are in the wandb group `experiment`."""

    def __init__(self, run: TrackerSettings):
        import wandb

        name, folder = run.experiment, str(run.folder)
        package_run = wandb.init(project=run.project, name=name, group=name, dir=folder, config=run.config)
        super().__init__(package_run, lambda samples: wandb.Table(dataframe=samples))
        self._end_service = wandb.teardown

    def close(self) -> None:
        super().close()
        self._end_service()  # wandb would do it at the end of the program, when the run's processes have been killed


def start_trackio(run: TrackerSettings) -> RunTracker:
    """Start Trackio; `trackio show` opens its dashboard."""
    import trackio

    resume = "allow" if run.resumed_step else "never"
    return RunTracker(
        trackio.init(run.project, name=run.experiment, config=run.config, resume=resume, embed=False),
        lambda samples: trackio.Table(dataframe=samples),
    )


def start_swanlab(run: TrackerSettings) -> RunTracker:
    """Start SwanLab; with SWANLAB_MODE=offline, in the folder swanlog of the run."""
    import swanlab

    folder = run.folder / "swanlog"
    earlier = sorted(folder.glob("run-*")) if run.resumed_step else []  # run-<time>-<id>
    resumed = {"id": earlier[-1].name.rpartition("-")[2], "resume": "allow"} if earlier else {}
    return RunTracker(
        swanlab.init(project=run.project, name=run.experiment, config=run.config, log_dir=str(folder), **resumed),
        lambda samples: swanlab.echarts.Table().add([*samples.columns], samples.values.tolist()),
    )


BACKENDS: dict[str, Callable[[TrackerSettings], Backend]] = {
    "tensorboard": TensorboardTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "trackio": start_trackio,
    "swanlab": start_swanlab,
}
