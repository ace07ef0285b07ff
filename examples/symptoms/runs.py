"""The symptoms, the conditions that define them, and the commands that produce them."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

FOLDER = Path(__file__).parent
HEALTHY, WARM_UP = "healthy", "warm_up"
CONDITION = re.compile(r"(first|last|min|max) (\S+) ([<>]) (-?[\d.e-]+)(?: x (first|last|min|max))?")

Lines = Sequence[Mapping[str, float]]  # of a metrics.jsonl


@dataclass(frozen=True)
class Symptom:
    """An entry of symptoms.yaml, which describes the fields."""

    name: str
    shows: Sequence[str]
    command: str = "ppo"
    warning: str = ""
    after: str = ""
    fix: Sequence[str] = ()

    @property
    def metrics(self) -> list[str]:
        return list(dict.fromkeys(condition.split()[1] for condition in self.shows))

    @property
    def healthy(self) -> str:
        """Name of the run to compare with."""
        return f"{self.name}_fixed" if self.fix else HEALTHY

    def is_shown_by(self, lines: Lines) -> bool:
        return all(holds(condition, lines) for condition in self.shows)


def load_symptoms() -> dict[str, Symptom]:
    entries = yaml.safe_load((FOLDER / "symptoms.yaml").read_text(encoding="utf-8"))
    return {name: Symptom(name, **entry) for name, entry in entries.items()}


def holds(condition: str, lines: Lines) -> bool:
    """Whether a run satisfies a condition such as `last reward/accuracy < 0.5 x first`. Raises ValueError for another
    form, and for a run without values of the metric."""
    if not (match := CONDITION.fullmatch(condition)):
        raise ValueError(f"{condition!r} is not a condition. Write e.g. 'last reward/accuracy < 0.5 x first'.")
    which, metric, sign, number, unit = match.groups()
    values = [value for _, value in read_points(lines, metric)]
    picked = {"first": values[0], "last": values[-1], "min": min(values), "max": max(values)}
    compare = operator.lt if sign == "<" else operator.gt
    return compare(picked[which], float(number) * (picked[unit] if unit else 1.0))


def read_points(lines: Lines, metric: str) -> list[tuple[float, float]]:
    """Points (step, value) of a metric. Raises ValueError if there are none."""
    if not (points := [(line["step"], line[metric]) for line in lines if line.get(metric) is not None]):
        raise ValueError(f"the run has no values of {metric}")
    return points


def list_runs(symptoms: Iterable[Symptom], out: Path, seed: int) -> dict[str, tuple[str, list[str]]]:
    """Runs that show the symptoms, and healthy runs beside them: {name: (command, arguments)}, in the order to run."""
    runs = {WARM_UP: ("sft", WARM_UP, [])}  # name: (command, configuration, overrides)
    for one in symptoms:
        runs |= {one.after: ("sft", one.after, [])} if one.after else {}
        runs[one.healthy] = (one.command, one.name if one.fix else HEALTHY, [*one.fix])
        runs[one.name] = (one.command, one.name, [])
    where = [f"trainer.output_dir={out.parent}", f"trainer.project_name={out.name}", f"trainer.seed={seed}"]
    source = ["--config-dir", str(FOLDER), "--config-name"]
    return {
        name: (command, [*source, config, *where, f"trainer.experiment_name={name}", *overrides])
        for name, (command, config, overrides) in runs.items()
    }


def find_warnings(printed: str) -> list[str]:
    """Warnings in the output of a run, without their step."""
    return re.findall(r"^note step \d+: (.*)", printed, re.MULTILINE)
