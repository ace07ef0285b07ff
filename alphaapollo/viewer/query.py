"""What a page is asked for, the summary of a run that all its pages show, and the formats of values."""

from __future__ import annotations

import math
import sqlite3
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException

from alphaapollo.observability.run_view import format_duration
from alphaapollo.utils.json_types import JsonObject
from alphaapollo.viewer.run_folders import find_kind, find_total_steps, make_run_name, read_json_object, read_run_state
from alphaapollo.viewer.samples import split_into_parts

SCORES = (
    *("val/accuracy", "distill/agreement", "distill/reverse_kl", "reward/accuracy", "critic/score/mean", "val/loss"),
    *("train/loss", "accuracy/chosen"),
)
PAGE_ROWS = 200


@dataclass(frozen=True)
class Query:
    """What a page is asked for."""

    database: sqlite3.Connection
    root: Path
    place: Mapping[str, Any]  # parts of the path: run, kind, step, line
    options: QueryParams

    def select(self, query: str, *values: object) -> list[sqlite3.Row]:
        return self.database.execute(query, values).fetchall()

    def select_page(self, query: str, values: Sequence[object], columns: Sequence[str]) -> dict[str, object]:
        """Sort the rows of a query by the options `sort` and `down`, and return the values of one page of its table.

        columns: columns by which the table can be sorted; the first one decides if there is no option.
        """
        sort, down = self.options.get("sort", columns[0]), self.options.get("down", "")
        if sort not in columns:
            raise HTTPException(404, f"The table cannot be sorted by {sort}. Choose {', '.join(columns)}.")
        page = max(int(self.options.get("page") or 0), 0)
        ordered = f"SELECT *, count(*) OVER () AS total FROM ({query}) ORDER BY {sort} {'DESC' if down else 'ASC'} "
        rows = self.select(f"{ordered} NULLS LAST, {columns[0]} LIMIT {PAGE_ROWS} OFFSET ?", *values, page * PAGE_ROWS)
        total = rows[0]["total"] if rows else 0
        table = {"sort": sort, "down": down, "page": page, "last_page": (total - 1) // PAGE_ROWS}
        return {"rows": rows, "num_rows": total, "table": {**table, "options": self.options}}

    def find_neighbors(self, table: str, column: str, **place: object) -> tuple[int | None, int | None]:
        """Return the next lower and the next higher value of the column, the last one of `place`, at the same place."""
        same = "".join(f"{name} = ? AND " for name in place if name != column)
        found = f"SELECT {{}}({column}) FROM {table} WHERE {same} {column} {{}} ?"
        return tuple(self.select(found.format(*end), *place.values())[0][0] for end in (("max", "<"), ("min", ">")))

    def find_run(self) -> RunSummary:
        """Return the run of the path. Raises HTTPException 404 if it does not exist or cannot be read."""
        rows = self.select("SELECT id, path FROM runs WHERE id = ?", self.place["run"])
        if not rows:
            raise HTTPException(404, f"There is no run {self.place['run']} in {self.root}. It may have been removed.")
        run = summarize_run(self, rows[0])
        if run.state == "unreadable":
            raise HTTPException(404, run.reason)
        return run


Describe = Callable[[Query], dict[str, object]]


@dataclass(frozen=True)
class RunSummary:
    """A run in the list of runs."""

    id: int
    name: str
    folder: Path
    kind: str
    state: str
    reason: str
    step: int | None = None
    total: int | None = None
    score: tuple[str, float] | None = None  # name and last value of its most important metric
    changed: float = 0.0  # seconds since 1970
    damaged: int = 0  # lines that could not be read
    unread: Sequence[sqlite3.Row] = ()  # name and error of the first files that could not be read


def summarize_run(query: Query, row: sqlite3.Row) -> RunSummary:
    """Summarize a run from the index and its small files. A run with damaged files is unreadable."""
    number, folder = row["id"], Path(row["path"])
    name = make_run_name(folder, query.root)
    last = "SELECT step, value FROM metrics WHERE run = ? AND name = ? ORDER BY step DESC LIMIT 1"
    scores = {name: found[0] for name in SCORES if (found := query.select(last, number, name))}
    step = query.select(last, number, "timing/step")
    files = query.select("SELECT total(damaged) AS damaged, max(mtime) AS changed FROM files WHERE run = ?", number)[0]
    try:
        state, kind, total = read_run_state(folder), find_kind(folder), find_total_steps(folder)
        figures = {} if scores else read_json_object(folder / "summary.json").get("all", {}).get("figures", {})
        score = next(((name, found["value"]) for name, found in (scores or figures).items()), None)
    except Exception as error:  # noqa: BLE001
        return RunSummary(number, name, folder, "unknown", "unreadable", f"{type(error).__name__}: {error}")
    return RunSummary(
        id=number,
        name=name,
        folder=folder,
        kind=kind,
        state=state.name,
        reason=state.reason,
        step=step[0]["step"] if step else max((found["step"] for found in scores.values()), default=None),
        total=total,
        score=score,
        changed=(files["changed"] or 0) / 1e9,
        damaged=int(files["damaged"]),
        unread=query.select("SELECT name, error FROM files WHERE run = ? AND error != '' LIMIT 5", number),
    )


def format_number(value: float | None) -> str:
    """Format a number with about four digits; a dash for None."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e9:
        return f"{int(value):,}"
    return f"{value:.3f}" if 0.001 <= abs(value) < 1e6 else f"{value:.2e}"


def format_estimate(estimate: JsonObject | None) -> str:
    """Format a mean with its interval, e.g. `0.812 (0.750 to 0.868)`; a dash for None."""
    if estimate is None or estimate.get("value") is None:
        return "-"
    value, low, high = (estimate.get(name) for name in ("value", "low", "high"))
    interval = "" if low is None or high is None else f" ({format_number(low)} to {format_number(high)})"
    return f"{format_number(value)}{interval}"


def format_counts(joined: str | None) -> str:
    """Count the values of a comma-separated list, most frequent first: `a,b,a` -> `2 x a, 1 x b`."""
    counts = Counter((joined or "").split(","))
    if len(counts) == 1 and not (joined or "none").startswith(tuple("-0123456789")):
        return next(iter(counts))
    shown = [f"{count} x {text.removesuffix('.0')}" for text, count in counts.most_common(8)]
    return ", ".join([*shown, "..."] if len(counts) > len(shown) else shown)


def format_time(seconds: float) -> str:
    """Format a time since 1970, e.g. `2026-11-24 15:20`; empty for 0."""
    return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M}" if seconds else ""


FILTERS: dict[str, Callable[..., object]] = {
    "number": format_number,
    "estimate": format_estimate,
    "counts": format_counts,
    "time": format_time,
    "duration": format_duration,
    "query_with": lambda options, **changes: urlencode({**options, **changes}),  # of a link
    "parts": lambda text: list(split_into_parts(text)),
}
