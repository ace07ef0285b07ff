"""What a page is asked for, and the summary of a run that all its pages show."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException

from alphaapollo.config.metrics import list_headlines
from alphaapollo.observability.metric_texts import choose_headline
from alphaapollo.plugins.viewer.run_folders import (
    describe_algorithm,
    describe_model,
    find_kind,
    find_total_steps,
    make_run_name,
    measure_costs,
    read_json_object,
    read_run_state,
)

PAGE_ROWS = 100


@dataclass(frozen=True)
class Query:
    """What a page is asked for."""

    database: sqlite3.Connection
    root: Path
    place: Mapping[str, Any]  # parts of the path: run, kind, step, line
    options: QueryParams
    texts: Path  # file of viewer/texts.py

    def select(self, query: str, *values: object) -> list[sqlite3.Row]:
        return self.database.execute(query, values).fetchall()

    def select_page(self, query: str, values: Sequence[object], columns: Sequence[str], first: str) -> dict[str, Any]:
        """Sort the rows of a query by the options `sort` and `down`, and return the values of one page of its table.

        columns: columns by which the table can be sorted. first: the one that decides if there is no option.
        """
        sort, down = self.options.get("sort", first), self.options.get("down", "")
        sortable = [name for name in columns if name != "answer"]  # a text, which is not in the database
        if sort not in (first, *sortable):
            raise HTTPException(404, f"The table cannot be sorted by {sort}. Choose {', '.join(sortable)}.")
        page = max(int(self.options.get("page") or 0), 0)
        order = f"ORDER BY {sort} {'DESC' if down else 'ASC'} NULLS LAST, {first} LIMIT {PAGE_ROWS} OFFSET ?"
        rows = self.select(f"SELECT * FROM ({query}) {order}", *values, page * PAGE_ROWS)
        (total,) = self.select(f"SELECT count(*) FROM ({query})", *values)[0]
        table = {"sortable": sortable, "sort": sort, "down": down, "page": page, "last_page": (total - 1) // PAGE_ROWS}
        return {"rows": rows, "num_rows": total, "table": {**table, "options": self.options}}

    def find_neighbors(self, table: str, column: str, **place: object) -> tuple[int | None, int | None]:
        """Return the next lower and the next higher value of the column, the last one of `place`, at the same place."""
        same = "".join(f"{name} = ? AND " for name in place if name != column)
        neighbor_query = f"SELECT {{}}({column}) FROM {table} WHERE {same} {column} {{}} ?"
        return tuple(
            self.select(neighbor_query.format(*end), *place.values())[0][0] for end in (("max", "<"), ("min", ">"))
        )

    @cached_property
    def run(self) -> RunSummary:
        """The run of the path. Raises HTTPException 404 if it does not exist or cannot be read."""
        rows = self.select("SELECT id, path FROM runs WHERE id = ?", self.place["run"])
        if not rows:
            raise HTTPException(404, f"There is no run {self.place['run']} in {self.root}. It may have been removed.")
        run = summarize_run(self, *rows[0])
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
    headline: Sequence[tuple[str, float]] = ()  # names and last values of its most important metrics
    changed: float = 0.0  # seconds since 1970
    damaged: int = 0  # lines that could not be read
    unread: Sequence[sqlite3.Row] = ()  # name and error of the first files that could not be read
    algorithm: str = ""
    model: str = ""
    parameters: float | None = None  # of the model
    seconds: float = 0.0  # wall time of its commands
    devices: int = 0  # GPUs
    speed: float | None = None  # sampled tokens per second
    seconds_left: float | None = None  # until the last iteration of a run that is running
    tags: str = ""
    note: str = ""
    hidden: bool = False


def summarize_run(query: Query, number: int, path: str | Path) -> RunSummary:
    """Summarize a run from the index and its small files. A run with damaged files is unreadable."""
    name = make_run_name(folder := Path(path), query.root)
    last = "SELECT step, value FROM metrics WHERE run = ? AND name = ? ORDER BY step DESC LIMIT 1"
    names = dict.fromkeys((*chain(*list_headlines()), "rollout/tokens_per_second", "timing/step"))
    values = {metric: rows[0] for metric in names if (rows := query.select(last, number, metric))}
    files = query.select("SELECT total(damaged) AS damaged, max(mtime) AS changed FROM files WHERE run = ?", number)[0]
    notes = query.select("SELECT tags, note, hidden FROM own.notes WHERE id = ?", number)
    try:
        state, kind, total = read_run_state(folder), find_kind(folder), find_total_steps(folder)
        model = describe_model(folder)
        seconds, devices = measure_costs(folder)
        figures = {} if values else read_json_object(folder / "summary.json").get("all", {}).get("figures", {})
        headline = [(metric, values[metric]["value"]) for metric in choose_headline(values)]
        headline = headline or [(figure, estimate["value"]) for figure, estimate in list(figures.items())[:2]]
    except Exception as error:  # noqa: BLE001
        return RunSummary(number, name, folder, "unknown", "unreadable", f"{type(error).__name__}: {error}")
    return RunSummary(
        id=number,
        name=name,
        folder=folder,
        kind=kind,
        state=state.name,
        reason=state.reason,
        step=max((row["step"] for row in values.values()), default=None),
        total=total,
        headline=headline,
        changed=(files["changed"] or 0) / 1e9,
        damaged=int(files["damaged"]),
        unread=query.select("SELECT name, error FROM files WHERE run = ? AND error != '' LIMIT 5", number),
        algorithm=describe_algorithm(folder),
        model=model[0],
        parameters=model[1],
        seconds=seconds,
        devices=devices,
        speed=values["rollout/tokens_per_second"]["value"] if "rollout/tokens_per_second" in values else None,
        seconds_left=state.seconds_left,
        **(dict(notes[0]) if notes else {}),
    )
