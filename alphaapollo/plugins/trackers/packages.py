"""Trackers of trainer.logger: TensorBoard, Weights & Biases, MLflow, Trackio and SwanLab."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from alphaapollo.observability.trackers import Backend, TrackerPackage, TrackerSettings

if TYPE_CHECKING:
    from pandas import DataFrame


def import_package(name: str, module: str = "") -> Any:
    """Import the package of a tracker. Raises ValueError if it cannot be imported."""
    try:
        return importlib.import_module(module or name)
    except ImportError as error:
        raise ValueError(
            f"trainer.logger has {name}, but the package {name} cannot be imported ({error}). "
            f"Run pip install -e '.[{name}]' in the clone, or remove {name} from trainer.logger."
        ) from None


def check_login(name: str, get_login: Callable[[Any], object]) -> None:
    """Raise ValueError if a tracker that uploads to its server has no login, or if its package is missing."""
    package, variable = import_package(name), f"{name.upper()}_MODE"
    if os.environ.get(variable, "online") in ("online", "cloud") and not get_login(package):
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


TENSORBOARD = TrackerPackage(start_tensorboard, lambda: import_package("tensorboard", "torch.utils.tensorboard"))
WANDB = TrackerPackage(start_wandb, lambda: check_login("wandb", lambda wandb: wandb.login(prompt=False, verify=False)))
MLFLOW = TrackerPackage(start_mlflow, lambda: import_package("mlflow"))
TRACKIO = TrackerPackage(start_trackio, lambda: import_package("trackio"))
SWANLAB = TrackerPackage(start_swanlab, lambda: check_login("swanlab", lambda swanlab: swanlab.Settings().api_key))
