"""Pages about runs: list of runs, overview, health, examples of fine-tuning, comparison, and self-evolution."""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from starlette.exceptions import HTTPException

from alphaapollo.rollout.suites import read_suite_results
from alphaapollo.runs.run_history import LoggedExample, read_examples, read_history, read_run_plan
from alphaapollo.utils.json_types import JsonObject
from alphaapollo.viewer.index import parse_file_name
from alphaapollo.viewer.pages.query import PAGE_ROWS, SCORES, Query, summarize_run
from alphaapollo.viewer.run_folders import read_content, read_flat_config, read_json_object
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
PROBLEM_COLUMNS = ("problem", "candidates", "right", "failed", "votes_for", "votes_against", "chosen_right")
PROBLEMS = (
    "SELECT c.problem, count(*) AS candidates, sum(c.is_right) AS right, sum(c.failed) AS failed, "
    "sum(j.votes_for) AS votes_for, sum(j.votes_against) AS votes_against, "
    "max(CASE WHEN c.candidate = (SELECT x.candidate FROM pool AS x WHERE (x.run, x.problem) = (c.run, c.problem) AND "
    "x.kind = 'choice' ORDER BY x.offset DESC LIMIT 1) THEN c.is_right END) AS chosen_right FROM pool AS c "
    "LEFT JOIN pool AS j ON (j.run, j.kind, j.candidate) = (c.run, 'judgement', c.candidate) "
    "WHERE c.run = ? AND c.kind = 'candidate' GROUP BY c.problem"
)
VERDICTS = (
    "SELECT c.is_right, j.votes_for > j.votes_against AS accepted, count(*) AS candidates FROM pool AS c "
    "JOIN pool AS j ON (j.run, j.kind, j.candidate) = (c.run, 'judgement', c.candidate) "
    "WHERE c.run = ? AND c.kind = 'candidate' AND c.is_right IS NOT NULL AND j.votes_for + j.votes_against > 0 "
    "GROUP BY c.is_right, accepted"
)


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
    metrics = "SELECT step, name, value FROM metrics WHERE run = ? AND (name LIKE 'accuracy/%' OR name LIKE 'cost/%')"
    rounds: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for row in query.select(f"{metrics} ORDER BY step", run):
        rounds[row["step"]][row["name"]] = row["value"]
    return {
        "accuracies": ACCURACIES,
        "rounds": rounds,
        "verdicts": {(row["is_right"], row["accepted"]): row["candidates"] for row in query.select(VERDICTS, run)},
        "report": read_json_object(folder / "report.json"),
    }


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
    judgements = {judgement["candidate"]: judgement for judgement in records["judgement"]}
    chosen = records["choice"][-1] if records["choice"] else {}
    candidates = sorted(
        records["candidate"], key=lambda one: (one["key"] != chosen.get("candidate"), *one["place"].values())
    )
    return {
        "run": run,
        "problem": problem,
        "result": read_json_object(run.folder / f"problems/{problem:06}.json"),
        "prompt": next((one["messages"][: one["asked"]] for one in candidates if one["messages"]), None),
        "chosen": chosen,
        "candidates": [
            (
                one,
                judgements.get(one["key"], {}),
                [each for each in records["verdict"] if each["candidate"] == one["key"]],
            )
            for one in candidates
        ],
        "neighbors": query.find_neighbors("pool", "problem", run=run.id, problem=problem),
    }
