"""Pages of the viewer: list of runs, overview, health, examples of fine-tuning, comparison, self-evolution, and the
iterations of a run (groups or trajectories, sorted and filtered by every column) with their trajectories."""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path

from starlette.exceptions import HTTPException

from alphaapollo.rollout.suites import read_suite_results
from alphaapollo.runs.rollout_log import TrainedRow
from alphaapollo.runs.run_history import LoggedExample, read_examples, read_history, read_run_plan
from alphaapollo.utils.json_types import JsonObject
from alphaapollo.viewer import samples
from alphaapollo.viewer.index import KIND_NAMES, make_file_name, parse_file_name
from alphaapollo.viewer.query import PAGE_ROWS, SCORES, Query, summarize_run
from alphaapollo.viewer.run_folders import find_tokenizer_file, read_content, read_flat_config, read_json_object
from alphaapollo.viewer.samples import compare_texts

MAIN_CURVES = (
    *("val/accuracy", "distill/divergence", "distill/agreement", "critic/score/mean", "reward/accuracy"),
    *("train/loss", "val/loss", "response_length/mean"),
    *("actor/entropy", "rollout/entropy", "actor/grad_norm", "groups/mixed", "accuracy/chosen", "accuracy/oracle"),
    *("accuracy/sampled", "accuracy/majority", "train/accuracy", "val/margin"),
)
HEALTH = {  # heading -> beginnings of names of metrics
    "Log-prob mismatch of engine and trainer": ("mismatch/", "sync/probe", "actor/correction"),
    "Entropy and clipping": ("actor/entropy", "rollout/entropy", "actor/pg_clip", "actor/clip_frac", "actor/ratio"),
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
EXAMPLES_ON_A_PAGE = 8
ACCURACIES = {  # name of the metric -> meaning
    "chosen": "the solution with the most votes so far",
    "sampled": "mean of the round's solutions",
    "majority": "the most frequent answer so far",
    "oracle": "at least one right solution so far",
}
PROBLEM_COLUMNS = ("problem", "candidates", "right", "failed", "votes_for", "votes_against")
PROBLEMS = (
    "SELECT c.problem, count(*) AS candidates, sum(c.is_right) AS right, sum(c.failed) AS failed, "
    "sum(j.votes_for) AS votes_for, sum(j.votes_against) AS votes_against FROM pool AS c "
    "LEFT JOIN pool AS j ON (j.run, j.kind, j.candidate) = (c.run, 'judgement', c.candidate) "
    "WHERE c.run = ? AND c.kind = 'candidate' GROUP BY c.problem"
)
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


def read_folders(database: sqlite3.Connection, runs: Sequence[int]) -> dict[int, Path]:
    """Return the folders of the runs that exist."""
    marks = ", ".join("?" * len(runs))
    rows = database.execute(f"SELECT id, path FROM runs WHERE id IN ({marks}) ORDER BY path", list(runs))
    return {row["id"]: Path(row["path"]) for row in rows}


def list_runs(query: Query) -> dict[str, object]:
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


def describe_run(query: Query) -> dict[str, object]:
    """Values of the page of a run."""
    run = query.find_run()
    names = list_metric_names(query, run.id)
    chosen = query.options.getlist("metric") or [name for name in MAIN_CURVES if name in names][:6]
    files = [parse_file_name(row["name"]) for row in query.select("SELECT name FROM files WHERE run = ?", run.id)]
    of_file = (
        "SELECT kind, step, count(*) AS samples, avg(reward) AS reward, sum(reward IS NULL) AS failed "
        "FROM trajectories WHERE run = ? AND kind = ? AND step = ? GROUP BY kind, step"
    )
    newest = sorted(files, key=lambda place: (-place[1], place[0]))[:PAGE_ROWS]
    return {
        "run": run,
        "names": names,
        "chosen": chosen,
        "steps": [row for place in newest for row in query.select(of_file, run.id, *place)],
        "history": read_history(run.folder),
        "plan": read_run_plan(run.folder),
        "summary": read_json_object(run.folder / "summary.json"),
        "suites": read_suite_results(run.folder)[::-1],
        "evolution": describe_evolution(query, run.id, run.folder) if run.kind == "evolution" else None,
        "warnings": _list_warnings(query, run.id, 5),
        "smooth": query.options.get("smooth", "0"),
    }


def describe_health(query: Query) -> dict[str, object]:
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


def compare_runs(query: Query) -> dict[str, object]:
    """Values of the comparison of runs: their configurations side by side, and curves of the same metrics."""
    ids = [int(run) for run in query.options.getlist("run")]
    rows = [query.select("SELECT id, path FROM runs WHERE id = ?", run) for run in ids]
    runs = [summarize_run(query, found[0]) for found in rows if found]
    if not runs:
        raise HTTPException(404, "Choose runs on the first page, then press Compare.")
    configs = [read_flat_config(run.folder) | read_content(run.folder) for run in runs]
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


def list_examples(query: Query) -> dict[str, object]:
    """Values of a page of examples. A pair also has the differences of its responses, word by word."""
    run, page = query.find_run(), max(int(query.options.get("page") or 0), 0)
    examples = read_examples(run.folder)
    first = page * EXAMPLES_ON_A_PAGE
    shown = examples[first : first + EXAMPLES_ON_A_PAGE]
    return {
        "run": run,
        "first": first,
        "num_examples": len(examples),
        "examples": [(one, compare_pair(one) if len(one.rows) == 2 else None) for one in shown],
        "table": {"page": page, "last_page": max(len(examples) - 1, 0) // EXAMPLES_ON_A_PAGE, "options": query.options},
    }


def compare_pair(pair: LoggedExample) -> tuple[str, list[tuple[str, str]]]:
    """Return the common prompt of a pair, and the difference of its responses as parts (kind, text)."""
    chosen, rejected = (row.parts for row in pair.rows)
    shared = chosen[0][2] if len(chosen) > 1 and chosen[0] == rejected[0] else ""
    texts = ("".join(text for _, _, text in parts).removeprefix(shared) for parts in (rejected, chosen))
    return shared, compare_texts(*texts)


def describe_evolution(query: Query, run: int, folder: Path) -> dict[str, object]:
    """Values of the section about an evolution on the page of the run."""
    rounds: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for row in query.select("SELECT step, name, value FROM metrics WHERE run = ? ORDER BY step", run):
        rounds[row["step"]][row["name"]] = row["value"]
    names = {kind: "table/{}_{}".format(*kind) for kind in product(("right", "wrong"), ("for", "against"))}
    verdicts = {kind: sum(values.get(name, 0) for values in rounds.values()) for kind, name in names.items()}
    report = read_json_object(folder / "report.json")
    return {"accuracies": ACCURACIES, "rounds": rounds, "verdicts": verdicts, "report": report}


def list_problems(query: Query) -> dict[str, object]:
    """Values of the table of an evolution's problems."""
    run = query.find_run()
    return {"run": run} | query.select_page(PROBLEMS, (run.id,), PROBLEM_COLUMNS)


def describe_problem(query: Query) -> dict[str, object]:
    """Values of the page of a problem: its candidates with their votes and reports, best first."""
    run, problem = query.find_run(), query.place["problem"]
    rows = query.select("SELECT offset, bytes FROM pool WHERE run = ? AND problem = ? ORDER BY offset", run.id, problem)
    if not rows:
        raise HTTPException(404, f"{run.name} has no candidates of problem {problem}.")
    records: defaultdict[str, list[JsonObject]] = defaultdict(list)
    with (run.folder / "pool.jsonl").open("rb") as file:
        for row in rows:
            file.seek(row["offset"])
            record = json.loads(file.read(row["bytes"]))
            records[record["kind"]].append(record)
    result = read_json_object(run.folder / f"problems/{problem:06}.json")
    judgements = {judgement["candidate"]: judgement for judgement in records["judgement"]}

    def rank(one: JsonObject) -> tuple[bool, int]:
        votes = judgements.get(one["key"], {"votes_for": 0, "votes_against": 0})
        return one["key"] != result.get("chosen"), votes["votes_against"] - votes["votes_for"]

    candidates = sorted(records["candidate"], key=rank)
    return {
        "run": run,
        "problem": problem,
        "result": result,
        "prompt": candidates and candidates[0]["messages"][: candidates[0].get("num_prompt_messages", 1)],
        "candidates": candidates,
        "judgements": judgements,
        "neighbors": query.find_neighbors("pool", "problem", run=run.id, problem=problem),
    }


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
