"""Pages of the viewer: list of runs, overview, health, configuration, comparison, examples of fine-tuning, and
self-evolution."""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from starlette.exceptions import HTTPException

from alphaapollo.rollout.suites import read_suite_results
from alphaapollo.runs.run_history import LoggedExample, read_examples, read_history, read_run_plan
from alphaapollo.utils.json_types import JsonObject
from alphaapollo.viewer.curves import (
    choose_curves,
    find_validation,
    list_final_values,
    list_metrics,
    separate_constants,
)
from alphaapollo.viewer.experiments import compare_configs, group_runs, list_paired_differences
from alphaapollo.viewer.query import Query, summarize_run
from alphaapollo.viewer.run_folders import read_json_object, tabulate_starts
from alphaapollo.viewer.samples import compare_texts

NUM_CURVES = 6  # and as many reward components
NEWEST_FILES = 12  # iterations with samples on the page of a run
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


def read_folders(database: sqlite3.Connection, runs: Sequence[int]) -> dict[int, Path]:
    """Return the folders of the runs that exist."""
    marks = ", ".join("?" * len(runs))
    rows = database.execute(f"SELECT id, path FROM runs WHERE id IN ({marks}) ORDER BY path", list(runs))
    return {row["id"]: Path(row["path"]) for row in rows}


def list_runs(query: Query) -> dict[str, object]:
    """Values of the list of runs."""
    options = query.options
    every = [summarize_run(query, *row) for row in query.select("SELECT id, path FROM runs")]
    every.sort(key=lambda run: (run.state != "running", -run.changed))
    words = options.get("text", "").lower().split()
    shown = [
        run
        for run in every
        if all(word in f"{run.name} {run.algorithm} {run.model}".lower() for word in words)
        and all(options.get(name, "") in ("", getattr(run, name)) for name in ("kind", "state"))
    ]
    return {
        "runs": shown,
        "kinds": sorted({run.kind for run in every}),
        "states": sorted({run.state for run in every}),
        "num_runs": len(every),
        "options": options,
    }


def describe_run(query: Query) -> dict[str, object]:
    """Values of the page of a run."""
    run, options = query.run, query.options
    names = list_metrics(query.database, run.id)
    drawn = set(names) - {find_validation(name) for name in names}  # the others are in the plots of training
    chosen, constants = choose_curves(query.database, [run.id], drawn, NUM_CURVES)
    files = "SELECT kind, step FROM iterations WHERE run = ? ORDER BY step DESC, kind LIMIT ?"
    of_file = (
        "SELECT kind, step, count(*) AS samples, avg(reward) AS reward, sum(reward IS NULL) AS failed, "
        "avg(tokens) AS tokens FROM trajectories WHERE run = ? AND kind = ? AND step = ? GROUP BY kind, step"
    )
    first = "SELECT value FROM metrics WHERE run = ? AND name = ? ORDER BY step LIMIT 1"
    newest = query.select(files, run.id, NEWEST_FILES)
    steps = [row for place in newest for row in query.select(of_file, run.id, *place)]
    return {
        "names": names,
        "chosen": options.getlist("metric") or chosen,
        "constants": constants,
        "values": [(name, value, query.select(first, run.id, name)) for name, value in run.headline],
        "steps": steps,
        "histogram_kind": max((row["kind"] for row in steps), key=lambda kind: kind == "step", default=""),
        "history": read_history(run.folder),
        "plan": read_run_plan(run.folder),
        "summary": read_json_object(run.folder / "summary.json"),
        "suites": read_suite_results(run.folder)[::-1],
        "evolution": describe_evolution(query, run.id, run.folder) if run.kind == "evolution" else None,
        "warnings": _list_warnings(query, run.id, 5),
        "options": options,
    }


def describe_health(query: Query) -> dict[str, object]:
    """Values of the page with the metrics that show problems, and the run's warnings."""
    run = query.run
    names = list_metrics(query.database, run.id)
    last = "SELECT value FROM metrics WHERE run = ? AND name = ? ORDER BY step DESC LIMIT 1"
    panels: dict[str, JsonObject] = {}
    for heading, beginnings in HEALTH.items():
        if of_panel := [name for name in names if name.startswith(beginnings)]:
            constants, varying = separate_constants(query.database, [run.id], of_panel)
            drawn = list(varying)[:MAX_HEALTH_CURVES]
            values = {name: query.select(last, run.id, name)[0]["value"] for name in drawn}
            panels[heading] = {"values": values, "constants": constants}
    return {"panels": panels, "warnings": _list_warnings(query, run.id, 100)}


def _list_warnings(query: Query, run: int, limit: int) -> list[sqlite3.Row]:
    return query.select("SELECT step, text FROM warnings WHERE run = ? ORDER BY step DESC LIMIT ?", run, limit)


def describe_config(query: Query) -> dict[str, object]:
    """Values of the page of a run's configuration: the values of its starts, those that are not defaults first."""
    names, rows = tabulate_starts(query.run.folder)
    return {
        "starts": names,
        "set": [row for row in rows if row.is_set],
        "defaults": [row for row in rows if not row.is_set],
        "plan": read_run_plan(query.run.folder),
    }


def compare_runs(query: Query) -> dict[str, object]:
    """Values of the comparison of runs: their configurations side by side, and curves of the same metrics."""
    folders = read_folders(query.database, [int(run) for run in query.options.getlist("run")])
    if not (runs := [summarize_run(query, run, folder) for run, folder in folders.items()]):
        raise HTTPException(404, "Choose runs on the first page, then press Compare.")
    different, same = compare_configs(list(folders.values()))
    names = {name for run in runs for name in list_metrics(query.database, run.id)}
    default, constants = choose_curves(query.database, list(folders), names, NUM_CURVES)
    groups, chosen = group_runs(folders, query.root, bool(query.options.get("seeds"))), query.options.getlist("metric")
    finals = list_final_values(query.database, groups, chosen or default)
    numbers = {label: number for number, label in enumerate(groups)}
    return {
        "finals": [(numbers[label], groups[label], label, row) for label, row in finals],
        "pairs": list(list_paired_differences(query.database, groups)),
        "first": next(iter(groups)),
        "constants": constants,
        "runs": runs,
        "differences": different,
        "same": same,
        "names": sorted(names),
        "chosen": chosen or default,
        "options": query.options,
    }


def list_examples(query: Query) -> dict[str, object]:
    """Values of a page of examples. A pair also has the differences of its responses, word by word."""
    run, page = query.run, max(int(query.options.get("page") or 0), 0)
    examples = read_examples(run.folder)
    first = page * EXAMPLES_ON_A_PAGE
    shown = examples[first : first + EXAMPLES_ON_A_PAGE]
    return {
        "first": first,
        "num_examples": len(examples),
        "examples": [(example, compare_pair(example) if len(example.rows) == 2 else None) for example in shown],
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
