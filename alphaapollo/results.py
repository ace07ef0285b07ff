"""Results of the Python API, read from the run folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from alphaapollo.config.metrics import load_catalogue
from alphaapollo.config.schema import Config, DpoConfig, GenerationConfig, SftConfig
from alphaapollo.runs.metrics_file import read_metrics
from alphaapollo.utils.json_types import JsonObject

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from alphaapollo.rollout.suites import SuiteResult


@dataclass(frozen=True)
class RunResult:
    """Result of a run that writes metrics.jsonl."""

    X_LABEL: ClassVar[str] = "step"  # label of the x axis of plots
    folder: Path

    @property
    def metrics(self) -> pd.DataFrame:
        """Contents of metrics.jsonl: one row per iteration or round (index: step), one column per metric."""
        import pandas as pd

        return pd.DataFrame(read_metrics(self.folder / "metrics.jsonl")).set_index("step").astype(float)

    def plot(self, *names: str) -> Figure:
        """Plot metrics with the confidence intervals that the run has logged. Default: the main metrics of the run."""
        from alphaapollo.observability.curve import plot_run

        metrics = self.metrics
        main = [name for name, metric in load_catalogue().main.items() if metric.plot]
        logged = [name for name in main if name in metrics and metrics[name].notna().any()]
        chosen = names or logged or main  # unknown names raise an error that lists the available ones
        return plot_run(self.folder / "metrics.jsonl", chosen, str(self.folder), self.X_LABEL)


@dataclass(frozen=True)
class TrainedRun(RunResult):
    """Result of a training run. `folder` contains config.yaml, metrics.jsonl, rollouts/, checkpoints/ and model/."""

    config: Config | SftConfig | DpoConfig

    @property
    def suites(self) -> list[SuiteResult]:
        """Results of evaluation suites on the run's models, oldest first."""
        from alphaapollo.rollout.suites import read_suite_results

        return read_suite_results(self.folder)

    @property
    def model(self) -> Path:
        """Folder with the run's newest model, for transformers and vLLM; exported first if a checkpoint is newer."""
        from alphaapollo.runs.newest_model import export_newest_model, find_newest_model

        newest = find_newest_model(self.folder)
        section: Any = getattr(self.config, "actor_rollout_ref", self.config)
        export_newest_model(newest, section.model.trust_remote_code)
        return newest.model_folder


@dataclass(frozen=True)
class Evaluation:
    """Result of a finished evaluation. `folder` contains results.jsonl, summary.json and summary.csv."""

    folder: Path
    config: GenerationConfig

    @property
    def metrics(self) -> pd.DataFrame:
        """Contents of summary.csv: data_source, figure (metric), value, low, high (95 % interval), problems (count)."""
        import pandas as pd

        return pd.read_csv(self.folder / "summary.csv", keep_default_na=False, na_values=["nan"])

    @property
    def results(self) -> list[JsonObject]:
        """Lines of results.jsonl: one sample each, with prompt, turns, rewards and stop reason."""
        return [json.loads(line) for line in (self.folder / "results.jsonl").read_bytes().splitlines()]

    @property
    def model(self) -> str:
        """Evaluated model: its folder or hub id."""
        return self.config.model.path

    def plot(self) -> Figure:
        """Plot avg@n, pass@k and maj@n with intervals, one color per data source."""
        from alphaapollo.observability.curve import Curve, plot_curves_as_figure

        shares = self.metrics.query("high <= 1")  # without metrics such as the response length
        names = list(shares["figure"].unique())
        rows = shares.assign(x=shares["figure"].map(names.index)).sort_values("x")
        curves = {}
        for source, table in rows.groupby("data_source"):
            band = table[["x", "low", "high"]].to_numpy(dtype=float)
            curves[str(source) or "(no data source)"] = Curve("", band[:, 0], table["value"].to_numpy(), band)
        figure = plot_curves_as_figure(curves, str(self.folder), "")
        figure.axes[0].set_xticks(range(len(names)), names, rotation=30, ha="right")
        return figure
