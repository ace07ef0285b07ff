"""What the Python API gives back: a run's folder, seen from Python."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alphaapollo.config.schema import Config, DpoConfig, GenerationConfig, SftConfig

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

DRAWN = ("reward/mean", "reward/accuracy", "val/accuracy", "train/loss", "val/loss")


@dataclass(frozen=True)
class TrainedRun:
    """A run that has ended. `folder` is the run's: config.yaml, metrics.jsonl, rollouts/, checkpoints/, model/."""

    folder: Path
    config: Config | SftConfig | DpoConfig

    @property
    def metrics(self) -> pd.DataFrame:
        """A row an iteration (index: step), a column a metric (docs/metrics.md); nan where one was not measured."""
        import pandas as pd

        lines = (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return pd.DataFrame([json.loads(line) for line in lines]).set_index("step").astype(float)

    @property
    def model(self) -> Path:
        """The folder of the newest model, for transformers and vLLM. A checkpoint that is newer is exported first.

        ValueError: there is neither a model nor a checkpoint; says how one comes to be.
        """
        from alphaapollo.cli.run_folder import export_newest
        from alphaapollo.startup.run_model import find_newest

        newest = find_newest(self.folder)
        export_newest(newest)
        return newest.folder

    def plot(self, *names: str) -> Figure:
        """Curves of these metrics; without names, of reward, accuracy and loss, where there are any.

        ValueError: no such metric, or matplotlib is not installed.
        """
        from alphaapollo.observability.curve import figure, read_curves

        chosen = names or tuple(name for name in DRAWN if name in self.metrics)
        return figure(read_curves(self.folder / "metrics.jsonl", chosen), str(self.folder))


@dataclass(frozen=True)
class Evaluation:
    """A generation that has ended. `folder` is its own: results.jsonl, summary.json, summary.csv."""

    folder: Path
    config: GenerationConfig

    @property
    def metrics(self) -> pd.DataFrame:
        """A row a figure: data_source, figure, value, low, high (its 95 % interval), problems (docs/evaluation.md)."""
        import pandas as pd

        return pd.read_csv(self.folder / "summary.csv", keep_default_na=False, na_values=["nan"])

    @property
    def results(self) -> list[dict[str, Any]]:
        """Every group as results.jsonl has it: the prompt and its samples with turns, rewards and stop reasons."""
        return [json.loads(line) for line in (self.folder / "results.jsonl").read_text(encoding="utf-8").splitlines()]

    @property
    def model(self) -> str:
        """What was evaluated: a folder, or a hub id."""
        return self.config.model.path

    def plot(self) -> Figure:
        """The shares (avg@n, pass@k, majority@n) with their intervals, a colour a data source."""
        from alphaapollo.observability.curve import intervals

        rows = self.metrics.to_numpy().tolist()
        shares = [(source, name, value, low, high) for source, name, value, low, high, _ in rows if high <= 1]
        return intervals(shares, str(self.folder))
