"""Pages about runs: list of runs, overview, health, and comparison."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path

from starlette.exceptions import HTTPException

from alphaapollo.launch.run_history import read_history
from alphaapollo.launch.run_plan import read_run_plan
from alphaapollo.rollout.suites import read_suite_results
from alphaapollo.viewer.index import parse_file_name
from alphaapollo.viewer.pages.evolution import describe_evolution
from alphaapollo.viewer.pages.query import PAGE_ROWS, SCORES, Query, summarize_run
from alphaapollo.viewer.run_folders import read_content, read_flat_config, read_json_object

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
