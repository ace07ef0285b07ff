"""Pages about samples: the groups or samples of an iteration, the search over all iterations of a run, and a sample."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from contextlib import suppress

from starlette.exceptions import HTTPException

from alphaapollo.runs.rollout_log import TrainedRow
from alphaapollo.utils.json_types import JsonObject
from alphaapollo.viewer import samples
from alphaapollo.viewer.index import KIND_NAMES
from alphaapollo.viewer.query import PAGE_ROWS, Query, RunSummary
from alphaapollo.viewer.run_folders import find_tokenizer_file
from alphaapollo.viewer.texts import find_lines

CHOSEN_BY_VALUE = ("outcome", "end", "stop_reason", "data_source")  # columns with a list of their values
NUMERIC = ("reward", "accuracy", "tokens", "turns", "advantage")
COMPARISONS = {"at least": ">=", "at most": "<=", "equal to": "="}
SAMPLE_COLUMNS = (
    *("status", "line", "answer", "reward", "accuracy", "advantage", "tokens", "turns", "end", "prompt_id"),
    "data_source",
)
FOUND_COLUMNS = ("status", "step", *SAMPLE_COLUMNS[1:])
GROUP_COLUMNS = {  # column of the table -> SQL
    "status": "CASE WHEN count(reward) = 0 THEN 'failed' WHEN count(advantage) = 0 THEN 'filtered' ELSE 'trained' END",
    "line": "min(line)",
    "rewards": "json_group_array(reward)",
    "reward": "avg(reward)",
    "variance": "max(avg(reward * reward) - avg(reward) * avg(reward), 0)",
    "accuracy": "avg(accuracy)",
    "advantage": "max(advantage)",
    "tokens": "avg(tokens)",
    "turns": "avg(turns)",
    "end": "group_concat(CASE WHEN end = 'done' AND stop_reason != '' THEN stop_reason ELSE end END)",
    "prompt_id": "prompt_id",
    "data_source": "data_source",
}
SHARED_CELLS = "min(tokens) AS shortest, max(tokens) AS longest, min(advantage) AS lowest, count(*) AS samples, "
SHARED_CELLS += "max(most) AS most"
Choices = dict[str, list[str]]
LABELS = {"line": "prompt", "step": "iteration", "prompt_id": "number", "variance": "spread", "data_source": "source"}
MAX_FOUND = 10_000  # samples that a search lists
SEARCH_SECONDS = 0.7
OF_SAMPLE = "t.*, abs(reward) AS most, CASE WHEN reward IS NULL THEN 'failed' ELSE outcome END AS status"
OF_TRAINING = "WHEN advantage IS NULL THEN 'not trained' ELSE 'trained'"
SAMPLES = (
    f"SELECT {OF_SAMPLE.replace('ELSE outcome', OF_TRAINING)}, advantage FROM trajectories AS t "
    "LEFT JOIN temp.trained USING (prompt_id, sample) WHERE run = ? AND kind = ? AND step = ?"
)
COLORED_BY = ("difference", "engine", "trainer", "advantage")  # attributes of samples.Token


def describe_iteration(query: Query) -> dict[str, object]:
    """Values of the table of an iteration's groups or samples."""
    run, kind, step, options = query.find_run(), query.place["kind"], query.place["step"], query.options
    place = (run.id, kind, step)
    if not query.select("SELECT 1 FROM trajectories WHERE run = ? AND kind = ? AND step = ? LIMIT 1", *place):
        raise HTTPException(404, f"{run.name} has no {KIND_NAMES.get(kind, kind)} samples of iteration {step}.")
    trained, damage = samples.read_trained_rows_of_step(run.folder, step) if kind == "step" else (None, "")
    _load_advantages(query, trained or [])
    condition, values = _make_condition(query)
    if words := options.get("text"):
        found = find_lines(query.database, query.texts, place, words)
        query.database.execute("CREATE TEMP TABLE found (line INTEGER PRIMARY KEY)")
        query.database.executemany("INSERT INTO temp.found VALUES (?)", [(line,) for line in found])
        condition += " AND line IN (SELECT line FROM temp.found)"
    view = options.get("view") or ("samples" if options.get("prompt_id") else "groups")
    chosen = f"SELECT * FROM ({SAMPLES}) WHERE {condition}"
    names: Sequence[str] = SAMPLE_COLUMNS
    if view == "samples":
        table = query.select_page(chosen, (*place, *values), _put_first("line", names))
        lines: Sequence[sqlite3.Row] = table["rows"]
    else:
        names = tuple(GROUP_COLUMNS)
        columns = ", ".join(f"{sql} AS {name}" for name, sql in GROUP_COLUMNS.items())
        groups = (
            f"SELECT {columns}, {SHARED_CELLS} FROM ({SAMPLES}) WHERE (prompt_id, data_source) IN "
            f"(SELECT prompt_id, data_source FROM ({chosen})) GROUP BY prompt_id, data_source"
        )
        table = query.select_page(groups, (*place, *place, *values), _put_first("prompt_id", names))
        lines = [_find_trajectory(query, *place, row["line"]) for row in table["rows"]]
    of_place = {"kind": kind, "kind_name": KIND_NAMES.get(kind, kind), "step": step, "view": view, "damage": damage}
    of_place["neighbors"] = query.find_neighbors("texts", "step", run=run.id, kind=kind, step=step)
    statuses = query.select(f"SELECT DISTINCT status FROM ({SAMPLES}) ORDER BY status", *place)
    choices: Choices = {} if trained is None else {"status": [row["status"] for row in statuses]}
    return {"run": run, "view": table | of_place | _describe_table(query, run, names, table, lines, choices)}


def _put_first(name: str, names: Sequence[str]) -> list[str]:
    """Return the columns that a table can be sorted by, the default first."""
    return [name, *(one for one in names if one not in (name, "answer"))]


def _describe_table(
    query: Query,
    run: RunSummary,
    names: Sequence[str],
    table: JsonObject,
    lines: Sequence[sqlite3.Row],
    own: JsonObject,
) -> JsonObject:
    """Return what the form and the cells of a table need. lines: of the trajectories whose texts its rows show.
    own: choices of the column status, if the trainer's log is known. Columns that say nothing are left out."""
    rows, known = table["rows"], query.select("SELECT name, value FROM choices WHERE run = ? ORDER BY value", run.id)
    choices = own | {one: [row["value"] for row in known if row["name"] == one] for one in CHOSEN_BY_VALUE}
    is_trained, scored = "status" in choices, {"scored", "not trained", "filtered"}
    hidden = [] if is_trained else ["advantage", *["status"] * all(row["status"] in scored for row in rows)]
    hidden += ["data_source"] * (len(choices["data_source"]) < 2)
    hidden += ["accuracy"] * all(row["accuracy"] == row["reward"] for row in rows)
    hidden += ["turns"] * all(row["turns"] == 1 for row in rows)
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    return {
        "choices": choices,
        "columns": {name: LABELS.get(name, name) for name in names if name not in hidden},
        "texts": [samples.read_texts(run.folder, one) for one in lines],
        "numeric": NUMERIC if is_trained else NUMERIC[:-1],
        "comparisons": COMPARISONS,
        "low": min(rewards, default=0.0),
        "high": max((row["most"] or 0.0 for row in rows), default=1.0),
    }


def search_samples(query: Query) -> dict[str, object]:
    """Values of the search over all iterations of a run, newest first. Ends at MAX_FOUND samples or after
    SEARCH_SECONDS; the option `before` continues below an iteration."""
    run, options = query.find_run(), query.options
    words, condition, values = options.get("text", ""), *_make_condition(query, is_run=True)
    places = "SELECT DISTINCT kind, step FROM texts WHERE run = ? ORDER BY step DESC, kind"
    files = [(row["kind"], row["step"]) for row in query.select(places, run.id)]
    kinds = {kind: name for kind, name in KIND_NAMES.items() if any(kind == own for own, _ in files)}
    before = int(options.get("before") or 2**62)
    query.database.execute("CREATE TEMP TABLE found (kind TEXT, step INT, line INT)")
    chosen = f"SELECT line FROM trajectories WHERE run = ? AND kind = ? AND step = ? AND {condition} LIMIT ?"
    num_found, rest, deadline = 0, None, time.monotonic() + SEARCH_SECONDS
    for kind, step in files:
        if step > before or options.get("of", "") not in ("", kind):
            continue
        if num_found >= MAX_FOUND or time.monotonic() > deadline:
            rest = step
            break
        lines = find_lines(query.database, query.texts, (run.id, kind, step), words) if words else None
        if lines is None or lines:
            limit = MAX_FOUND if lines is None else -1
            matching = [row["line"] for row in query.select(chosen, run.id, kind, step, *values, limit)]
            found = [(kind, step, line) for line in matching if lines is None or line in lines]
            query.database.executemany("INSERT INTO temp.found VALUES (?, ?, ?)", found)
            num_found += len(found)
    columns = f"{OF_SAMPLE}, t.line - t.step * 10000000000 AS at"
    joined = f"SELECT {columns} FROM temp.found JOIN trajectories AS t USING (kind, step, line) WHERE run = ?"
    table = query.select_page(joined, (run.id,), _put_first("at", FOUND_COLUMNS))
    of_search = {"view": "samples", "kinds": kinds, "rest": rest, "num_files": len(files)}
    described = _describe_table(query, run, FOUND_COLUMNS, table, table["rows"], {})
    return {"run": run, "view": table | of_search | described}


def _load_advantages(query: Query, trained: Sequence[TrainedRow]) -> None:
    """Load the mean advantage of each trajectory that was trained on into the table `temp.trained`."""
    key = "prompt_id INT, sample INT, advantage REAL, PRIMARY KEY (prompt_id, sample)"
    query.database.execute(f"CREATE TEMP TABLE trained ({key})")
    means = [
        (row.prompt_id, row.sample, float(row.advantages[row.advantages != 0].mean()) if row.advantages.any() else 0.0)
        for row in trained
    ]
    query.database.executemany("INSERT OR REPLACE INTO temp.trained VALUES (?, ?, ?)", means)


def _make_condition(query: Query, is_run: bool = False) -> tuple[str, list[object]]:
    """Return the SQL condition that the options ask for, except their text, and its values. is_run: of a table without
    the trainer's columns."""
    options = query.options
    names = [*CHOSEN_BY_VALUE, "prompt_id", "sample", *["status"] * (not is_run)]
    wanted = {name: options[name] for name in names if options.get(name)}
    conditions, values = [f"{name} = ?" for name in wanted], list[object](wanted.values())
    with suppress(ValueError):
        number = float(options.get("number", ""))
        if options.get("where") in (NUMERIC[:-1] if is_run else NUMERIC) and options.get("is") in COMPARISONS:
            conditions.append(f"{options['where']} {COMPARISONS[options['is']]} ?")
            values.append(number)
    return " AND ".join(conditions) or "true", values


def describe_conversation(query: Query) -> dict[str, object]:
    """Values of the conversation of a sample, which a row of a table opens."""
    run, kind, step, line = query.find_run(), query.place["kind"], query.place["step"], query.place["line"]
    row = _find_trajectory(query, run.id, kind, step, line)
    record = samples.read_record(run.folder, row)
    return {"run": run, "row": row, "record": record, "branches": list_branches(record)}


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
