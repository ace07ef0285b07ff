"""Pages about samples: the groups or samples of an iteration, the search over all iterations of a run, and a sample."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Sequence
from contextlib import suppress

from starlette.exceptions import HTTPException

from alphaapollo.plugins.viewer import samples
from alphaapollo.plugins.viewer.index import CHOICES, KIND_NAMES
from alphaapollo.plugins.viewer.query import PAGE_ROWS, Query
from alphaapollo.plugins.viewer.run_folders import find_tokenizer_file
from alphaapollo.plugins.viewer.texts import find_lines
from alphaapollo.runs.rollout_log import TrainedRow
from alphaapollo.utils.json_types import JsonObject

NUMERIC = ("reward", "accuracy", "tokens", "turns", "advantage")
COMPARISONS = {"at least": ">=", "at most": "<=", "equal to": "="}
SAMPLE_COLUMNS = (  # phones show the first two
    *("line", "reward", "status", "answer", "accuracy", "advantage", "tokens", "turns", "end", "prompt_id"),
    "data_source",
)
FOUND_COLUMNS = (*SAMPLE_COLUMNS[:2], "step", *SAMPLE_COLUMNS[2:])
GROUP_COLUMNS = {  # column of the table -> SQL
    "line": "min(line)",
    "reward": "avg(reward)",
    "rewards": "json_group_array(reward)",
    "status": "CASE WHEN count(reward) = 0 THEN 'failed' WHEN count(advantage) = 0 THEN 'filtered' ELSE 'trained' END",
    "variance": "max(avg(reward * reward) - avg(reward) * avg(reward), 0)",
    "accuracy": "iif(count(accuracy) = count(reward), avg(accuracy), NULL)",
    "advantage": "max(advantage)",
    "tokens": "avg(tokens)",
    "turns": "avg(turns)",
    "end": "group_concat(CASE WHEN end = 'done' AND stop_reason != '' THEN stop_reason ELSE end END)",
    "prompt_id": "prompt_id",
    "data_source": "data_source",
}
SHARED_CELLS = "min(tokens) AS shortest, max(tokens) AS longest, min(advantage) AS lowest, count(*) AS samples, "
SHARED_CELLS += "max(most) AS most"
LABELS = {"line": "prompt", "step": "iteration", "prompt_id": "number", "variance": "spread", "data_source": "source"}
MAX_FOUND = 10_000  # samples that a search lists
SEARCH_SECONDS = 0.7
SAMPLES = (  # of a file, with `most`: length of a bar
    "SELECT t.*, abs(reward) AS most, advantage, CASE WHEN reward IS NULL THEN "
    "'failed' WHEN {} THEN iif(advantage IS NULL, 'not trained', 'trained') ELSE outcome "
    "END AS status FROM trajectories AS t LEFT JOIN temp.trained USING (prompt_id, sample) "
    "WHERE run = ? AND kind = ? AND step = ?"
)
FOUND = "SELECT rowid AS at, * FROM temp.found"  # in the order of the search: newest iteration first, file by file
COLORED_BY = ("difference", "engine", "trainer", "advantage")  # attributes of samples.Token


def describe_iteration(query: Query) -> dict[str, object]:
    """Values of the table of an iteration's groups or samples."""
    run, kind, step, options = query.run, query.place["kind"], query.place["step"], query.options
    place, kind_name = (run.id, kind, step), KIND_NAMES.get(kind, kind)
    if not query.select("SELECT 1 FROM trajectories WHERE run = ? AND kind = ? AND step = ? LIMIT 1", *place):
        raise HTTPException(404, f"{run.name} has no {kind_name} samples of iteration {step}.")
    trained, damage = samples.read_trained_rows_of_step(run.folder, step) if kind == "step" else (None, "")
    selected = SAMPLES.format(trained is not None)
    _fill_found_table(query, [(kind, step)], trained, max_found=-1)
    view = options.get("view") or ("samples" if options.get("prompt_id") else "groups")
    if view == "samples":
        names: Sequence[str] = SAMPLE_COLUMNS
        table = query.select_page(FOUND, (), names, "line")
        table["lines"] = table["rows"]
    else:
        names = tuple(GROUP_COLUMNS)
        columns = ", ".join(f"{sql} AS {name}" for name, sql in GROUP_COLUMNS.items())
        groups = (
            f"SELECT {columns}, {SHARED_CELLS} FROM ({selected}) WHERE (prompt_id, data_source) IN "
            "(SELECT prompt_id, data_source FROM temp.found) GROUP BY prompt_id, data_source"
        )
        table = query.select_page(groups, place, names, "prompt_id")
        table["lines"] = [_find_trajectory(query, *place, row["line"]) for row in table["rows"]]
    table |= {"kind": kind, "kind_name": kind_name, "step": step, "view": view, "damage": damage}
    table["neighbors"] = query.find_neighbors("texts", "step", run=run.id, kind=kind, step=step)
    statuses = query.select(f"SELECT DISTINCT status FROM ({selected}) ORDER BY status", *place)
    return {
        "view": _describe_table(query, names, table, [row["status"] for row in statuses] if trained is not None else [])
    }


def _describe_table(query: Query, names: Sequence[str], table: JsonObject, statuses: Sequence[str]) -> JsonObject:
    """Add what the form and the cells of a table need. `lines` of the table: trajectories whose texts its rows show.
    statuses: choices of the column status, if the trainer's log is known. Columns that say nothing are left out."""
    run, rows, scored = query.run, table["rows"], {"scored", "not trained", "filtered"}
    choice_rows = query.select("SELECT name, value FROM choices WHERE run = ? ORDER BY value", run.id)
    choices = {column: [row["value"] for row in choice_rows if row["name"] == column] for column in CHOICES}
    hidden = [] if statuses else ["advantage", *["status"] * all(row["status"] in scored for row in rows)]
    hidden += ["data_source"] * (len(choices["data_source"]) < 2)
    hidden += ["accuracy"] * all(row["accuracy"] in (None, row["reward"]) for row in rows)
    hidden += ["turns"] * all(row["turns"] == 1 for row in rows)
    return table | {
        "choices": {"status": statuses} | choices,
        "columns": {name: LABELS.get(name, name) for name in names if name not in hidden},
        "texts": [samples.read_texts(run.folder, trajectory) for trajectory in table["lines"]],
        "numeric": NUMERIC if statuses else NUMERIC[:-1],
        "comparisons": COMPARISONS,
        "low": min((row["reward"] for row in rows if row["reward"] is not None), default=0.0),
        "high": max((row["most"] or 0.0 for row in rows), default=1.0),
    }


def search_samples(query: Query) -> dict[str, object]:
    """Values of the search over all iterations of a run, newest first. Ends at MAX_FOUND samples or after
    SEARCH_SECONDS; the option `before` continues below an iteration."""
    options = query.options
    places = "SELECT DISTINCT kind, step FROM texts WHERE run = ? ORDER BY step DESC, kind"
    files = [(row["kind"], row["step"]) for row in query.select(places, query.run.id)]
    kinds = {kind: name for kind, name in KIND_NAMES.items() if any(kind == file_kind for file_kind, _ in files)}
    before, wanted_kind = int(options.get("before") or 2**62), options.get("of", "")
    searched = [(kind, step) for kind, step in files if step <= before and wanted_kind in ("", kind)]
    rest = _fill_found_table(query, searched, trained=None, max_found=MAX_FOUND)
    table = query.select_page(FOUND, (), FOUND_COLUMNS, "at")
    table |= {"view": "samples", "kinds": kinds, "rest": rest, "num_files": len(files), "lines": table["rows"]}
    return {"view": _describe_table(query, FOUND_COLUMNS, table, [])}


def _fill_found_table(
    query: Query, files: Sequence[tuple[str, int]], trained: Sequence[TrainedRow] | None, max_found: int
) -> int | None:
    """Put the samples that the options ask for into the table `temp.found`, and the mean advantage of each trajectory
    that was trained on into `temp.trained`.

    files: kinds and iterations, searched in this order until there are max_found samples (-1: all), or for
        SEARCH_SECONDS. trained: the trainer's log; None: unknown. Returns the first iteration that was not searched.
    """
    database, words, (condition, values) = query.database, query.options.get("text", ""), _make_condition(query)
    database.execute(
        "CREATE TEMP TABLE trained (prompt_id INT, sample INT, advantage, PRIMARY KEY (prompt_id, sample))"
    )
    used = [(row, row.advantages[row.advantages != 0]) for row in trained or ()]
    means = [
        (row.prompt_id, row.sample, float(advantages.mean()) if len(advantages) else 0.0) for row, advantages in used
    ]
    database.executemany("INSERT OR REPLACE INTO temp.trained VALUES (?, ?, ?)", means)
    selected = SAMPLES.format(trained is not None)
    database.execute(f"CREATE TEMP TABLE found AS {selected} LIMIT 0", (0, "", 0))
    chosen = f"INSERT INTO temp.found SELECT * FROM ({selected}) WHERE {condition}"
    chosen += " AND line IN (SELECT value FROM json_each(?))" * bool(words)
    num_found, deadline = 0, time.monotonic() + SEARCH_SECONDS
    for kind, step in files:
        if max_found >= 0 and (num_found >= max_found or time.monotonic() > deadline):
            return step
        place = (query.run.id, kind, step)
        lines = find_lines(database, query.texts, place, words) if words else set()
        if lines or not words:
            listed = [json.dumps(sorted(lines))] * bool(words)
            num_found += database.execute(
                f"{chosen} ORDER BY line LIMIT ?", (*place, *values, *listed, max_found)
            ).rowcount
    return None


def _make_condition(query: Query) -> tuple[str, list[object]]:
    """Return the SQL condition that the options ask for, except their text, and its values."""
    options = query.options
    names = (*CHOICES, "prompt_id", "sample", "status")
    wanted = {name: options[name] for name in names if options.get(name)}
    conditions, values = [f"{name} = ?" for name in wanted], list[object](wanted.values())
    with suppress(ValueError):
        number = float(options.get("number", ""))
        if options.get("where") in NUMERIC and options.get("is") in COMPARISONS:
            conditions.append(f"{options['where']} {COMPARISONS[options['is']]} ?")
            values.append(number)
    return " AND ".join(conditions) or "true", values


def describe_trajectory(query: Query) -> dict[str, object]:
    """Values of the page of a trajectory: its conversation, its tokens, and the same prompt at other iterations."""
    run, kind, step, line = query.run, query.place["kind"], query.place["step"], query.place["line"]
    row = _find_trajectory(query, run.id, kind, step, line)
    record, options = samples.read_record(run.folder, row), query.options
    others = query.select(
        "SELECT * FROM trajectories WHERE run = ? AND question = ? ORDER BY step DESC, kind, sample LIMIT ?",
        *(run.id, row["question"], PAGE_ROWS),
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
        "groups": _find_neighbor_groups(query, row),
        "iterations": query.find_neighbors("texts", "step", run=run.id, kind=kind, step=step),
    }


def _find_neighbor_groups(query: Query, row: sqlite3.Row) -> list[int | None]:
    """Return the numbers of a sample of the previous group, and of the first one of the next group."""
    place = "FROM trajectories WHERE run = ? AND kind = ? AND step = ? AND prompt_id != ?"
    values = (row["run"], row["kind"], row["step"], row["prompt_id"], row["line"])
    ends = ("max(line)", "<"), ("min(line)", ">")
    return [query.select(f"SELECT {line} AS line {place} AND line {sign} ?", *values)[0]["line"] for line, sign in ends]


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
