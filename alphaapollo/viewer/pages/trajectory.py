"""Page of a trajectory: its conversation, its tokens, and the same prompt at other iterations."""

from __future__ import annotations

import sqlite3

from starlette.exceptions import HTTPException

from alphaapollo.utils.json_types import JsonObject
from alphaapollo.viewer import samples
from alphaapollo.viewer.index import KIND_NAMES
from alphaapollo.viewer.pages.query import PAGE_ROWS, Query
from alphaapollo.viewer.run_folders import find_tokenizer_file

COLORED_BY = ("difference", "engine", "trainer", "advantage")  # attributes of samples.Token


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
