"""A round in flat figures: its line of metrics.jsonl, as every other command writes one an iteration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from alphaapollo.evaluation.figures import Figure
from alphaapollo.evolving.figures import round_figures
from alphaapollo.evolving.pool import Pool, Spent


def round_metrics(pool: Pool, problems: Sequence[int], number: int) -> dict[str, float]:
    """As docs/metrics.md names them; nan where no problem has the figure, or too few for an interval."""
    figures = round_figures(pool, problems, number)
    own = [one for one in pool.candidates.values() if one.place.round == number]
    spent = spent_in(pool, number)
    shown: dict[str, Figure | None] = {
        "accuracy/chosen": figures.chosen,
        "accuracy/sampled": figures.sampled,
        "accuracy/majority": figures.majority,
        "accuracy/oracle": figures.oracle,
    }
    metrics = {name: value for key, figure in shown.items() for name, value in _flat(key, figure).items()}
    metrics |= {f"table/{name}": float(count) for name, count in asdict(figures.table).items()}
    metrics |= {"candidates/made": float(len(own)), "candidates/failed": float(sum(bool(one.failure) for one in own))}
    return metrics | {"cost/calls": float(spent.calls), "cost/tokens": float(spent.tokens), "cost/money": spent.money}


def _flat(name: str, figure: Figure | None) -> dict[str, float]:
    values = (None, None, None) if figure is None else (figure.value, figure.low, figure.high)
    names = (name, f"{name}/low", f"{name}/high")
    return {key: float("nan") if value is None else value for key, value in zip(names, values, strict=True)}


def spent_in(pool: Pool, number: int) -> Spent:
    """What the calls of a round took, those for candidates that are not whole yet among them."""
    return sum((spent for owner, spent in pool.spent.items() if f".r{number}." in owner), Spent())
