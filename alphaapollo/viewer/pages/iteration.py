"""Pages of an iteration (its groups or trajectories, sorted and filtered by every column) and of a trajectory."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from starlette.exceptions import HTTPException

from alphaapollo.runs.rollout_log import TrainedRow
from alphaapollo.utils.json_types import JsonObject
from alphaapollo.viewer import samples
from alphaapollo.viewer.index import KIND_NAMES, make_file_name
from alphaapollo.viewer.pages.query import PAGE_ROWS, Query
from alphaapollo.viewer.run_folders import find_tokenizer_file

CHOSEN_BY_VALUE = ("status", "outcome", "end", "stop_reason", "data_source")  # columns with a list of their values
NUMERIC = ("reward", "accuracy", "tokens", "turns", "advantage")
COMPARISONS = {"at least": ">=", "at most": "<=", "equal to": "="}
SAMPLE_COLUMNS = (
    *("line", "prompt_id", "sample", "reward", "accuracy", "tokens", "turns", "outcome", "end", "stop_reason"),
    *("advantage", "status", "data_source"),
)
GROUP_COLUMNS = {  # column -> SQL
    "prompt_id": "prompt_id",
    "samples": "count(*)",
    "reward": "avg(reward)",
    "variance": "max(avg(reward * reward) - avg(reward) * avg(reward), 0)",
    "rewards": "group_concat(reward)",
    "accuracy": "avg(accuracy)",
    "tokens": "avg(tokens)",
    "shortest": "min(tokens)",
    "longest": "max(tokens)",
    "turns": "avg(turns)",
    "end": "group_concat(end)",
    "stop_reason": "group_concat(stop_reason)",
    "lowest_advantage": "min(advantage)",
    "advantage": "max(advantage)",
    "status": "CASE WHEN count(reward) = 0 THEN 'failed' WHEN count(advantage) = 0 THEN 'filtered' ELSE 'trained' END",
    "data_source": "data_source",
}
OF_TRAINING = ("advantage", "status")  # columns that need the trainer's log
LABELS = {"prompt_id": "prompt", "variance": "spread", "stop_reason": "stop reason", "data_source": "data source"}
SHARED_CELLS = ("shortest", "longest", "lowest_advantage")  # shown in the cells of tokens and advantage
SAMPLES = (
    "SELECT t.*, advantage, CASE WHEN reward IS NULL THEN 'failed' WHEN advantage IS NULL THEN 'not trained' "
    "ELSE 'trained' END AS status FROM trajectories AS t LEFT JOIN temp.trained USING (prompt_id, sample) "
    "WHERE run = ? AND kind = ? AND step = ?"
)
COLORED_BY = ("difference", "engine", "trainer", "advantage")  # attributes of samples.Token


def describe_iteration(query: Query) -> dict[str, object]:
    """Values of the table of an iteration's groups or trajectories."""
    run, kind, step, options = query.find_run(), query.place["kind"], query.place["step"], query.options
    place = (run.id, kind, step)
    if not query.select("SELECT 1 FROM trajectories WHERE run = ? AND kind = ? AND step = ? LIMIT 1", *place):
        raise HTTPException(404, f"{run.name} has no {KIND_NAMES.get(kind, kind)} samples of iteration {step}.")
    trained, damage = samples.read_trained_rows_of_step(run.folder, step) if kind == "step" else (None, "")
    _load_advantages(query, trained or [])
    condition, values = _make_condition(query, run.folder)
    view = options.get("view") or ("samples" if options.get("prompt_id") else "groups")
    chosen = f"SELECT * FROM ({SAMPLES}) WHERE {condition}"
    if view == "samples":
        names: Sequence[str] = SAMPLE_COLUMNS
        table = query.select_page(chosen, (*place, *values), names)
    else:
        names = tuple(GROUP_COLUMNS)
        columns = ", ".join(f"{sql} AS {name}" for name, sql in GROUP_COLUMNS.items())
        groups = (
            f"SELECT {columns} FROM ({SAMPLES}) WHERE (prompt_id, data_source) IN "
            f"(SELECT prompt_id, data_source FROM ({chosen})) GROUP BY prompt_id, data_source"
        )
        table = query.select_page(groups, (*place, *place, *values), names)
    kinds = query.select(f"SELECT DISTINCT {', '.join(CHOSEN_BY_VALUE)} FROM ({SAMPLES})", *place)
    choices = {name: sorted({row[name] for row in kinds if row[name]}) for name in CHOSEN_BY_VALUE}
    hidden = [name for name in OF_TRAINING if trained is None] + ["data_source"] * (len(choices["data_source"]) < 2)
    return table | {
        "run": run,
        "kind": kind,
        "kind_name": KIND_NAMES.get(kind, kind),
        "step": step,
        "view": view,
        "damage": damage,
        "neighbors": query.find_neighbors("trajectories", "step", run=run.id, kind=kind, step=step),
        "choices": {name: values for name, values in choices.items() if name not in hidden},
        "columns": {name: LABELS.get(name, name) for name in names if name not in (*hidden, *SHARED_CELLS)},
        "numeric": [name for name in NUMERIC if name not in hidden],
        "comparisons": COMPARISONS,
    }


def _load_advantages(query: Query, trained: Sequence[TrainedRow]) -> None:
    """Load the mean advantage of each trajectory that was trained on into the table `temp.trained`."""
    key = "prompt_id INT, sample INT, advantage REAL, PRIMARY KEY (prompt_id, sample)"
    query.database.execute(f"CREATE TEMP TABLE trained ({key})")
    means = [
        (row.prompt_id, row.sample, float(row.advantages[row.advantages != 0].mean()) if row.advantages.any() else 0.0)
        for row in trained
    ]
    query.database.executemany("INSERT OR REPLACE INTO temp.trained VALUES (?, ?, ?)", means)


def _make_condition(query: Query, folder: Path) -> tuple[str, list[object]]:
    """Return the SQL condition that the options ask for, and its values."""
    options = query.options
    wanted = {name: options[name] for name in (*CHOSEN_BY_VALUE, "prompt_id", "sample") if options.get(name)}
    conditions, values = [f"{name} = ?" for name in wanted], list[object](wanted.values())
    with suppress(ValueError):
        number = float(options.get("number", ""))
        if options.get("where") in NUMERIC and options.get("is") in COMPARISONS:
            conditions.append(f"{options['where']} {COMPARISONS[options['is']]} ?")
            values.append(number)
    if words := options.get("text"):
        found = samples.find_lines_with_text(folder / make_file_name(query.place["kind"], query.place["step"]), words)
        query.database.execute("CREATE TEMP TABLE found (offset INTEGER PRIMARY KEY)")
        query.database.executemany("INSERT INTO temp.found VALUES (?)", [(offset,) for offset in found])
        conditions.append("offset IN (SELECT offset FROM temp.found)")
    return " AND ".join(conditions) or "true", values


def describe_trajectory(query: Query) -> dict[str, object]:
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
    rows, damage = samples.read_trained_rows_of_step(run.folder, step) if kind == "step" else (None, "")
    trained = samples.find_trained_row(rows or [], record, number)
    has_tokens = number < len(record["rows"])
    return {
        "run": run,
        "row": row,
        "record": record,
        "kind_name": KIND_NAMES.get(kind, kind),
        "branches": list_branches(record),
        "tokens": samples.list_tokens(run.folder, record, number, trained, colored_by) if has_tokens else [],
        "damage": damage,
        "row_number": number,
        "colored_by": colored_by,
        "has_tokenizer": find_tokenizer_file(run.folder) is not None,
        "others": others,
        "compared": compared,
        "compared_with": options.get("with", ""),
        "neighbors": query.find_neighbors("trajectories", "line", run=run.id, kind=kind, step=step, line=line),
    }


def _find_trajectory(query: Query, run: int, kind: str, step: int, line: int) -> sqlite3.Row:
    place = "SELECT * FROM trajectories WHERE run = ? AND kind = ? AND step = ? AND line = ?"
    rows = query.select(place, run, kind, step, line)
    if not rows:
        raise HTTPException(404, f"There is no sample {line} in iteration {step} ({KIND_NAMES.get(kind, kind)}).")
    return rows[0]


def list_branches(record: JsonObject) -> list[JsonObject]:
    """Group the turns of a trajectory by its token sequences. A program of the user may have several."""
    starts = [row["first_turn"] for row in record["rows"]]
    turns = record["turns"]
    if len(starts) < 2 or not any("request" in turn.get("info", {}) for turn in turns):
        return [{"turns": turns, "number": 0}]
    ends = [*starts[1:], len(turns)]
    return [{"turns": turns[start:end], "number": n} for n, (start, end) in enumerate(zip(starts, ends, strict=True))]
