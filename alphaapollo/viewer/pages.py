"""Values of the pages: functions from the index and the files of a run to the values of a template."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException

from alphaapollo.launch.run_history import read_history
from alphaapollo.observability.console import format_duration
from alphaapollo.viewer import samples
from alphaapollo.viewer.index import make_file_name
from alphaapollo.viewer.run_folders import (
    find_kind,
    find_tokenizer_file,
    find_total_steps,
    make_run_name,
    read_flat_config,
    read_json_object,
    read_run_state,
)

SCORES = ("val/accuracy", "reward/accuracy", "critic/score/mean", "val/loss", "train/loss", "accuracy/chosen")
MAIN_CURVES = (
    *("val/accuracy", "critic/score/mean", "reward/accuracy", "train/loss", "val/loss", "response_length/mean"),
    *("actor/entropy", "rollout/entropy", "actor/grad_norm", "groups/mixed", "accuracy/chosen", "accuracy/oracle"),
)
HEALTH = {  # heading -> beginnings of names of metrics
    "Log-prob mismatch of engine and trainer": ("mismatch/", "sync/probe", "actor/correction"),
    "Entropy and clipping": (
        "actor/entropy",
        "rollout/entropy",
        "actor/pg_clipfrac",
        "actor/clip_fraction",
        "actor/ratio",
    ),
    "Gradients": ("actor/grad", "actor/lr", "actor/ref_kl", "actor/old_policy_kl", "critic/vf_explained"),
    "Groups": ("groups/",),
    "Lengths": ("response_length/mean", "response_length/p99", "response_length/clip_ratio", "prompt_length/max"),
    "Failures": ("outcome/", "end/", "turn/invalid", "tool/"),
    "Staleness": ("staleness/", "async/"),
    "Time by phase, seconds": ("timing/",),
    "Speed": ("rollout/tokens_per_second", "speed/", "rollout/prompt_tokens_cached"),
    "Memory, GiB": ("memory/",),
}
MAX_HEALTH_CURVES = 8  # per heading
PAGE_ROWS = 200
SORTABLE = ("line", "prompt_id", "sample", "reward", "tokens", "turns", "outcome", "end", "stop_reason", "data_source")
FILTERED = ("outcome", "end", "data_source")  # columns with a list of their values
KIND_NAMES = {"step": "training", "val": "validation", "val_greedy": "validation, greedy", "results": "evaluation"}
COLORED_BY = ("difference", "engine", "trainer", "advantage")  # attributes of samples.Token


@dataclass(frozen=True)
class Query:
    """What a page is asked for."""

    database: sqlite3.Connection
    root: Path
    place: Mapping[str, Any]  # parts of the path: run, kind, step, line
    options: QueryParams

    def select(self, query: str, *values: Any) -> list[sqlite3.Row]:
        return self.database.execute(query, values).fetchall()

    def find_run(self) -> RunSummary:
        """Return the run of the path. Raises HTTPException 404 if it does not exist."""
        rows = self.select("SELECT id, path FROM runs WHERE id = ?", self.place["run"])
        if not rows:
            raise HTTPException(404, f"There is no run {self.place['run']} in {self.root}. It may have been removed.")
        return summarize_run(self, rows[0])


@dataclass(frozen=True)
class RunSummary:
    """A run in the list of runs."""

    id: int
    name: str
    folder: Path
    kind: str
    state: str
    reason: str
    step: int | None
    total: int | None
    score: tuple[str, float] | None  # name and last value of its most important metric
    changed: float  # seconds since 1970
    damaged: int  # lines that could not be read


Describe = Callable[[Query], dict[str, Any]]


def read_folders(database: sqlite3.Connection, runs: Sequence[int]) -> dict[int, Path]:
    """Return the folders of the runs that exist."""
    marks = ", ".join("?" * len(runs))
    rows = database.execute(f"SELECT id, path FROM runs WHERE id IN ({marks}) ORDER BY path", list(runs))
    return {row["id"]: Path(row["path"]) for row in rows}


def summarize_run(query: Query, row: sqlite3.Row) -> RunSummary:
    """Summarize a run from the index and its small files."""
    folder, state = Path(row["path"]), read_run_state(Path(row["path"]))
    files = query.select(
        "SELECT coalesce(sum(damaged), 0) AS damaged, max(mtime) AS changed FROM files WHERE run = ?", row["id"]
    )[0]
    last = "SELECT step, value FROM metrics WHERE run = ? AND name = ? ORDER BY step DESC LIMIT 1"
    scores = {name: found[0] for name in SCORES if (found := query.select(last, row["id"], name))}
    step = query.select(last, row["id"], "timing/step")
    name = next(iter(scores), None)
    return RunSummary(
        id=row["id"],
        name=make_run_name(folder, query.root),
        folder=folder,
        kind=find_kind(folder),
        state=state.name,
        reason=state.reason,
        step=step[0]["step"] if step else max((found["step"] for found in scores.values()), default=None),
        total=find_total_steps(folder),
        score=None if name is None else (name, scores[name]["value"]),
        changed=(files["changed"] or 0) / 1e9,
        damaged=files["damaged"],
    )


def list_runs(query: Query) -> dict[str, Any]:
    """Values of the list of runs."""
    runs = [summarize_run(query, row) for row in query.select("SELECT id, path FROM runs")]
    runs.sort(key=lambda run: (run.state != "running", -run.changed))
    shown = [run.id for run in runs[:8]]
    metric = next((name for name in SCORES if any(run.score and run.score[0] == name for run in runs[:8])), "")
    return {"runs": runs, "shown": shown, "metric": metric}


def list_metric_names(query: Query, run: int) -> list[str]:
    """List the metrics of a run. Jumps from name to name, because a run may have millions of values."""
    names, name = [], ""
    while found := query.select("SELECT min(name) AS name FROM metrics WHERE run = ? AND name > ?", run, name):
        if (name := found[0]["name"]) is None:
            break
        names.append(name)
    return names


def describe_run(query: Query) -> dict[str, Any]:
    """Values of the page of a run."""
    run = query.find_run()
    names = list_metric_names(query, run.id)
    chosen = query.options.getlist("metric") or [name for name in MAIN_CURVES if name in names][:6]
    steps = query.select(
        "SELECT kind, step, count(*) AS samples, avg(reward) AS reward, sum(reward IS NULL) AS failed "
        "FROM trajectories WHERE run = ? GROUP BY kind, step ORDER BY step DESC, kind LIMIT ?",
        run.id,
        PAGE_ROWS,
    )
    return {
        "run": run,
        "names": names,
        "chosen": chosen,
        "steps": steps,
        "history": read_history(run.folder),
        "summary": read_json_object(run.folder / "summary.json"),
        "report": read_json_object(run.folder / "report.json"),
        "warnings": _list_warnings(query, run.id, 5),
        "smooth": query.options.get("smooth", "0"),
    }


def describe_health(query: Query) -> dict[str, Any]:
    """Values of the page with the metrics that show problems, and the run's warnings."""
    run = query.find_run()
    names = list_metric_names(query, run.id)
    panels = {
        heading: [name for name in names if name.startswith(beginnings)][:MAX_HEALTH_CURVES]
        for heading, beginnings in HEALTH.items()
    }
    last = "SELECT value FROM metrics WHERE run = ? AND name = ? ORDER BY step DESC LIMIT 1"
    values = {name: query.select(last, run.id, name)[0]["value"] for panel in panels.values() for name in panel}
    return {"run": run, "panels": panels, "values": values, "warnings": _list_warnings(query, run.id, 100)}


def _list_warnings(query: Query, run: int, limit: int) -> list[sqlite3.Row]:
    return query.select("SELECT step, text FROM warnings WHERE run = ? ORDER BY step DESC LIMIT ?", run, limit)


def compare_runs(query: Query) -> dict[str, Any]:
    """Values of the comparison of runs: their configurations side by side, and curves of the same metrics."""
    ids = [int(run) for run in query.options.getlist("run")]
    rows = [query.select("SELECT id, path FROM runs WHERE id = ?", run) for run in ids]
    runs = [summarize_run(query, found[0]) for found in rows if found]
    if not runs:
        raise HTTPException(404, "Choose runs on the first page, then press Compare.")
    configs = [read_flat_config(run.folder) for run in runs]
    keys = sorted({key for config in configs for key in config})
    table = [(key, [config.get(key) for config in configs]) for key in keys]
    names = sorted({name for run in runs for name in list_metric_names(query, run.id)})
    return {
        "runs": runs,
        "differences": [row for row in table if len(set(row[1])) > 1],
        "same": [row for row in table if len(set(row[1])) == 1],
        "names": names,
        "chosen": query.options.getlist("metric") or [name for name in MAIN_CURVES if name in names][:4],
        "smooth": query.options.get("smooth", "0"),
        "seeds": query.options.get("seeds", ""),
    }


def describe_iteration(query: Query) -> dict[str, Any]:
    """Values of the table of an iteration's trajectories, sorted and filtered."""
    run, kind, step = query.find_run(), query.place["kind"], query.place["step"]
    options, place = query.options, (run.id, kind, step)
    sort, down = options.get("sort", "line"), options.get("down", "")
    if sort not in SORTABLE:
        raise HTTPException(404, f"The table cannot be sorted by {sort}. Choose {', '.join(SORTABLE)}.")
    where, values = "run = ? AND kind = ? AND step = ?", list(place)
    for column in SORTABLE:
        if wanted := options.get(column):
            where += f" AND {column} = ?"
            values.append(wanted)
    order = f"ORDER BY {sort} {'DESC' if down else 'ASC'}, line"
    rows = query.select(f"SELECT * FROM trajectories WHERE {where} {order}", *values)
    if not rows and not query.select("SELECT 1 FROM trajectories WHERE run = ? AND kind = ? AND step = ?", *place):
        raise HTTPException(404, f"{run.name} has no {KIND_NAMES.get(kind, kind)} samples of iteration {step}.")
    if words := options.get("text", ""):
        found = samples.find_lines_with_text(run.folder / make_file_name(kind, step), words)
        rows = [row for row in rows if row["offset"] in found]
    page = max(int(options.get("page") or 0), 0)
    around = "SELECT {}(step) AS step FROM trajectories WHERE run = ? AND kind = ? AND step {} ?"
    distinct = "SELECT DISTINCT {} FROM trajectories WHERE run = ? AND kind = ? AND step = ? ORDER BY 1"
    return {
        "run": run,
        "kind": kind,
        "kind_name": KIND_NAMES.get(kind, kind),
        "step": step,
        "rows": rows[page * PAGE_ROWS : (page + 1) * PAGE_ROWS],
        "num_rows": len(rows),
        "page": page,
        "pages": (len(rows) + PAGE_ROWS - 1) // PAGE_ROWS,
        "sort": sort,
        "down": down,
        "options": options,
        "advantages": _read_advantages(run.folder, step) if kind == "step" else None,
        "before": query.select(around.format("max", "<"), *place)[0]["step"],
        "after": query.select(around.format("min", ">"), *place)[0]["step"],
        "choices": {name: [row[0] for row in query.select(distinct.format(name), *place)] for name in FILTERED},
    }


def _read_advantages(folder: Path, step: int) -> dict[tuple[int, int], float] | None:
    """Return the mean advantage of each trajectory that was trained on; None if the run has not logged them."""
    rows = samples.read_trained_rows_of_step(folder, step)
    if rows is None:
        return None
    return {
        (row.prompt_id, row.sample): float(row.advantages[row.advantages != 0].mean()) if row.advantages.any() else 0.0
        for row in rows
    }


def describe_trajectory(query: Query) -> dict[str, Any]:
    """Values of the page of a trajectory: its conversation, its tokens, and the same prompt at other iterations."""
    run, kind, step, line = query.find_run(), query.place["kind"], query.place["step"], query.place["line"]
    row = _find_trajectory(query, run.id, kind, step, line)
    record, options = samples.read_record(run.folder, row), query.options
    others = query.select(
        "SELECT * FROM trajectories WHERE run = ? AND prompt_id = ? AND data_source = ? "
        "ORDER BY step DESC, kind, sample LIMIT ?",
        *(run.id, row["prompt_id"], row["data_source"], PAGE_ROWS),
    )
    compared = None
    if other := options.get("with"):
        other_kind, other_step, other_line = other.split("/")
        other_row = _find_trajectory(query, run.id, other_kind, int(other_step), int(other_line))
        compared = samples.compare_texts(samples.read_record(run.folder, other_row)["text"], record["text"])
    number, colored_by = int(options.get("row") or 0), options.get("color", "difference")
    if colored_by not in COLORED_BY:
        raise HTTPException(404, f"Tokens cannot be colored by {colored_by}. Choose {', '.join(COLORED_BY)}.")
    has_tokens = number < len(record["rows"])
    neighbors = query.select(
        "SELECT max(CASE WHEN line < ? THEN line END) AS before, min(CASE WHEN line > ? THEN line END) AS after "
        "FROM trajectories WHERE run = ? AND kind = ? AND step = ?",
        *(line, line, run.id, kind, step),
    )
    return {
        "run": run,
        "row": row,
        "record": record,
        "kind_name": KIND_NAMES.get(kind, kind),
        "branches": list_branches(record),
        "tokens": samples.list_tokens(run.folder, record, number, colored_by) if has_tokens else [],
        "row_number": number,
        "colored_by": colored_by,
        "has_tokenizer": find_tokenizer_file(run.folder) is not None,
        "others": others,
        "compared": compared,
        "compared_with": options.get("with", ""),
        "neighbors": neighbors[0],
    }


def _find_trajectory(query: Query, run: int, kind: str, step: int, line: int) -> sqlite3.Row:
    place = "SELECT * FROM trajectories WHERE run = ? AND kind = ? AND step = ? AND line = ?"
    rows = query.select(place, run, kind, step, line)
    if not rows:
        raise HTTPException(404, f"There is no sample {line} in iteration {step} ({KIND_NAMES.get(kind, kind)}).")
    return rows[0]


def list_branches(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Group the turns of a trajectory by its token sequences. A program of the user may have several."""
    starts = [row["first_turn"] for row in record["rows"]]
    turns = record["turns"]
    if len(starts) < 2 or not any("request" in turn.get("info", {}) for turn in turns):
        return [{"turns": turns, "number": 0}]
    ends = [*starts[1:], len(turns)]
    return [{"turns": turns[start:end], "number": n} for n, (start, end) in enumerate(zip(starts, ends, strict=True))]


def format_number(value: float | None) -> str:
    """Format a number with about four digits; a dash for None."""
    if value is None:
        return "-"
    if value == int(value) and abs(value) < 1e9:
        return f"{int(value):,}"
    return f"{value:.3f}" if 0.001 <= abs(value) < 1e6 else f"{value:.2e}"


def format_time(seconds: float) -> str:
    """Format a time since 1970, e.g. `2026-11-24 15:20`; empty for 0."""
    return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M}" if seconds else ""


def make_query_string(options: QueryParams, **changes: Any) -> str:
    """Return the query of a link: these options with changes."""
    return urlencode({**options, **changes})


FILTERS: dict[str, Callable[..., Any]] = {
    "number": format_number,
    "time": format_time,
    "duration": format_duration,
    "query_with": make_query_string,
    "parts": lambda text: list(samples.split_into_parts(text)),
}
