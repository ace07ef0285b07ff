"""What the Python API gives back: a run's folder, seen from Python."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alphaapollo.config.schema import Config, DpoConfig, EvolvingConfig, GenerationConfig, SftConfig

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

DRAWN = ("reward/mean", "reward/accuracy", "val/accuracy", "train/loss", "val/loss")
ACCURACIES = ("accuracy/chosen", "accuracy/sampled", "accuracy/majority", "accuracy/oracle")


@dataclass(frozen=True)
class TrainedRun:
    """A run that has ended. `folder` is the run's: config.yaml, metrics.jsonl, rollouts/, checkpoints/, model/."""

    folder: Path
    config: Config | SftConfig | DpoConfig

    @property
    def metrics(self) -> pd.DataFrame:
        """A row an iteration (index: step), a column a metric (docs/metrics.md); nan where one was not measured."""
        return _metrics(self.folder)

    @property
    def model(self) -> Path:
        """The folder of the newest model, for transformers and vLLM. A checkpoint that is newer is exported first.

        ValueError: there is neither a model nor a checkpoint; says how one comes to be.
        """
        from alphaapollo.cli.run_folder import export_newest
        from alphaapollo.launch.run_model import find_newest

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
        return [json.loads(line) for line in (self.folder / "results.jsonl").read_bytes().splitlines()]

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


@dataclass(frozen=True)
class EvolvedRun:
    """An evolution that has ended. `folder` is the run's: pool.jsonl, report.json, problems/, metrics.jsonl."""

    folder: Path
    config: EvolvingConfig

    @property
    def metrics(self) -> pd.DataFrame:
        """A row a round (index: step), a column a figure (docs/metrics.md); nan where no problem has it."""
        return _metrics(self.folder)

    @property
    def report(self) -> dict[str, Any]:
        """report.json: rounds, the table of policy and verifiers, calibration, costs by role, failures, and why it
        ended early (`halted`)."""
        report: dict[str, Any] = json.loads((self.folder / "report.json").read_text(encoding="utf-8"))
        return report

    @property
    def problems(self) -> list[dict[str, Any]]:
        """Every problem as its file in problems/ has it: the answer, and all candidates with their verdicts."""
        files = sorted((self.folder / "problems").glob("*.json"))
        return [json.loads(file.read_text(encoding="utf-8")) for file in files]

    @property
    def pool(self) -> Path:
        """pool.jsonl, with every call; `python -m alphaapollo.evolving.export` makes training data of its folder."""
        return self.folder / "pool.jsonl"

    def plot(self, *names: str) -> Figure:
        """These figures by round, with their intervals; without names, the accuracies.

        ValueError: no such figure, or matplotlib is not installed.
        """
        from alphaapollo.observability.curve import figure, read_curves

        metrics = self.metrics
        known = tuple(name for name in ACCURACIES if metrics[name].notna().any())
        chosen = names or known or ACCURACIES  # the last are refused, by what there is
        curves = read_curves(self.folder / "metrics.jsonl", chosen)
        bounds = {name: [f"{name}/low", f"{name}/high"] for name in chosen if f"{name}/low" in metrics}
        bands = {name: metrics[own].dropna().to_records().tolist() for name, own in bounds.items()}
        return figure(curves, str(self.folder), "round", bands)


def _metrics(folder: Path) -> pd.DataFrame:
    import pandas as pd

    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return pd.DataFrame([json.loads(line) for line in lines]).set_index("step").astype(float)
