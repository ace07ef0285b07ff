"""Write the metrics of a run to metrics.jsonl, and to tensorboard and wandb if trainer.logger lists them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from alphaapollo.observability.metrics_file import JsonlTracker

WANDB_FIX = (
    "Log in with `wandb login` or WANDB_API_KEY=..., set WANDB_MODE=offline to write to the run's folder, or remove "
    "wandb from trainer.logger."
)


class Tracker:
    """Tracker of a run: writes metrics to metrics.jsonl and to the trackers of trainer.logger.

    Args:
        config: configuration of the run as JSON types. wandb stores all of it.
        resumed_step: iteration of the resumed checkpoint; 0 for a new run. Metrics of later iterations are removed.
        notice: called with a message about damaged lines in metrics.jsonl.

    Raises ValueError if a package that trainer.logger needs is not installed.
    """

    def __init__(
        self, config: Mapping[str, Any], folder: Path, resumed_step: int, notice: Callable[[str], None] = print
    ):
        trainer = config["trainer"]
        names = trainer["logger"]
        check_trackers(names)
        self._trackers: list[JsonlTracker | TensorboardTracker | WandbTracker]
        self._trackers = [JsonlTracker(folder / "metrics.jsonl", resumed_step, notice)]
        if "tensorboard" in names:
            self._trackers.append(TensorboardTracker(folder / "tensorboard", resumed_step))
        if "wandb" in names:
            self._trackers.append(WandbTracker(trainer["project_name"], trainer["experiment_name"], folder, config))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


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
    """Tracker that writes event files for `tensorboard --logdir`."""

    def __init__(self, folder: Path, resumed_step: int):
        from torch.utils.tensorboard import SummaryWriter

        # purge_step: tensorboard hides steps that were logged after the checkpoint
        self._writer = SummaryWriter(str(folder), purge_step=resumed_step + 1 if resumed_step else None)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """Tracker that logs to Weights & Biases. Each start of a run creates a new wandb run in the group `experiment`."""

    def __init__(self, project: str, experiment: str, folder: Path, config: Mapping[str, Any]):
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                project=project, name=experiment, group=experiment, dir=str(folder), config=dict(config)
            )
        except wandb.errors.UsageError as error:
            raise ValueError(f"trainer.logger has wandb, which failed: {error}. {WANDB_FIX}") from None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()
