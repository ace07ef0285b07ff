"""Pages of the viewer: list of runs, overview, health, configuration, comparison, examples of fine-tuning, and
self-evolution."""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from starlette.exceptions import HTTPException

from alphaapollo.config.metrics import find_metric, is_lower_better, load_catalogue
from alphaapollo.plugins.viewer import samples
from alphaapollo.plugins.viewer.curves import (
    choose_curves,
    find_constants,
    find_validation,
    list_final_values,
    list_metrics,
    read_curve,
    summarize_values,
)
from alphaapollo.plugins.viewer.experiments import group_runs, identify_run, list_paired_differences
from alphaapollo.plugins.viewer.index import KIND_NAMES
from alphaapollo.plugins.viewer.query import Query, RunSummary, summarize_run
from alphaapollo.plugins.viewer.run_folders import (
    list_checks,
    list_config_starts,
    read_json_object,
    read_set_keys,
    read_settings,
)
from alphaapollo.plugins.viewer.samples import compare_texts
from alphaapollo.rollout.suites import read_suite_results
from alphaapollo.runs.command_history import read_history
from alphaapollo.runs.run_plan import read_run_plan
from alphaapollo.runs.training_examples import LoggedExample, read_examples
from alphaapollo.utils.disk import open_regular, parse_json
from alphaapollo.utils.json_types import JsonObject

NUM_CURVES = 6  # and as many reward components
MAX_RELATED = 8  # newest runs that may be in the plot on the first page
NEWEST_FILES = 12  # iterations with samples on the page of a run
SWEEP_COLUMNS = 6  # keys that differ
NAMES = ("trainer.experiment_name", "trainer.output_dir", "trainer.project_name")
MAX_HEALTH_CURVES = 8  # per heading
EXAMPLES_ON_A_PAGE = 8
ACCURACIES = ("chosen", "sampled", "majority", "oracle")  # of an evolution: names of the metrics accuracy/NAME
PROBLEM_COLUMNS = ("problem", "right", "candidates", "failed", "votes_for", "votes_against")
PROBLEMS = (
    "SELECT c.problem, count(*) AS candidates, sum(c.is_right) AS right, sum(c.failed) AS failed, "
    "sum(j.votes_for) AS votes_for, sum(j.votes_against) AS votes_against FROM pool AS c "
    "LEFT JOIN pool AS j ON (j.run, j.kind, j.candidate) = (c.run, 'judgement', c.candidate) "
    "WHERE c.run = ? AND c.kind = 'candidate' GROUP BY c.problem"
)


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
        if (not run.hidden or options.get("hidden"))
        and all(word in f"{run.name} {run.algorithm} {run.model} {run.tags} {run.note}".lower() for word in words)
        and all(options.get(name, "") in ("", getattr(run, name)) for name in ("kind", "state"))
    ]
    inputs = identify_run(shown[0].folder)[0] if shown else ()
    related = {run.id: run.folder for run in shown[:MAX_RELATED] if inputs and identify_run(run.folder)[0] == inputs}
    return {
        "runs": shown,
        "sweeps": list_sweeps(shown) if options.get("by") == "sweep" else [],
        "kinds": sorted({run.kind for run in every}),
        "states": sorted({run.state for run in every}),
        "num_hidden": sum(run.hidden for run in every),
        "num_runs": len(every),
        "metric": shown[0].headline[0][0] if len(related) > 1 and shown[0].headline else "",
        "related": group_runs(dict(sorted(related.items(), key=lambda item: str(item[1]))), query.root, by_seed=False),
        "options": options,
    }


def list_sweeps(runs: Sequence[RunSummary]) -> list[JsonObject]:
    """Group runs of the same kind in the same folder, the best run first, with the keys that differ in each group."""
    groups: defaultdict[tuple[Path, str], list[RunSummary]] = defaultdict(list)
    for run in runs:
        groups[run.folder.parent, run.kind].append(run)
    sweeps, others = [], [group[0] for group in groups.values() if len(group) == 1]
    for (folder, kind), group in groups.items():
        if len(group) > 1:
            configs = {run.id: read_settings(run.folder) for run in group}
            keys = sorted({key for config in configs.values() for key in config if not key.startswith(NAMES)})
            differing = [key for key in keys if len({config.get(key) for config in configs.values()}) > 1]
            metric = next((run.headline[-1][0] for run in group if run.headline), "")
            sign = 1 if is_lower_better(metric) else -1
            group.sort(key=lambda run: sign * dict(run.headline).get(metric, sign * float("inf")))
            sweep = {"name": folder.name, "kind": kind, "runs": group, "metric": metric, "configs": configs}
            sweeps.append(sweep | {"keys": differing[:SWEEP_COLUMNS], "num_keys": len(differing)})
    alone = {"name": "other runs", "kind": "", "runs": others, "metric": "", "configs": {}, "keys": [], "num_keys": 0}
    return sweeps + [alone] * bool(others)


def describe_run(query: Query) -> dict[str, object]:
    """Values of the page of a run."""
    run, options = query.run, query.options
    names = list_metrics(query.database, run.id)
    drawn = set(names) - {find_validation(name) for name in names}  # the others are in the plots of training
    chosen, constants = choose_curves(query.database, [run.id], drawn, NUM_CURVES)
    files = "SELECT DISTINCT kind, step FROM texts WHERE run = ? ORDER BY step DESC, kind LIMIT ?"
    of_file = (
        "SELECT kind, step, count(*) AS samples, avg(reward) AS reward, sum(reward IS NULL) AS failed, "
        "min(reward) AS low, max(reward) AS high, avg(tokens) AS tokens "
        "FROM trajectories WHERE run = ? AND kind = ? AND step = ? GROUP BY kind, step"
    )
    firsts = {name: read_curve(query.database, run.id, name, name).values[:1].tolist() for name, _ in run.headline}
    # rollouts/ has a file for each (kind, step).
    newest = query.select(files, run.id, NEWEST_FILES)
    steps = [row for place in newest for row in query.select(of_file, run.id, *place)]
    return {
        "names": names,
        "chosen": options.getlist("metric") or chosen,
        "constants": constants,
        "values": [(name, value, next(iter(firsts[name]), None)) for name, value in run.headline],
        "steps": steps,
        "extremes": _list_extremes(query, run, steps[0]) if steps else [],
        "kind_names": KIND_NAMES,
        # that of training, if there is any
        "histogram_kind": max((row["kind"] for row in steps), key=lambda kind: kind == "step", default=""),
        "history": read_history(run.folder),
        "plan": read_run_plan(run.folder),
        "summary": read_json_object(run.folder / "summary.json"),
        "checks": list(list_checks(run.folder)),
        "suites": read_suite_results(run.folder)[::-1],
        "evolution": describe_evolution(query, run.id, run.folder) if run.kind == "evolution" else None,
        "warnings": _list_warnings(query, run.id, 5),
        "options": options,
    }


def _list_extremes(query: Query, run: RunSummary, newest: sqlite3.Row) -> list[tuple[object, ...]]:
    """Return the best and the worst sample of an iteration as (label, row, texts); one, if all rewards are equal."""
    best = "SELECT * FROM trajectories WHERE run = ? AND kind = ? AND step = ? AND reward = ? ORDER BY line LIMIT 1"
    ends = {"best": newest["high"], "worst": newest["low"]}
    if newest["low"] == newest["high"]:
        ends = {"first": newest["low"]}
    rows = [(label, query.select(best, run.id, newest["kind"], newest["step"], value)) for label, value in ends.items()]
    return [(label, matches[0], samples.read_texts(run.folder, matches[0])) for label, matches in rows if matches]


def describe_health(query: Query) -> dict[str, object]:
    """Values of the page with the metrics that show problems, and the run's warnings."""
    run = query.run
    names = list_metrics(query.database, run.id)
    last = "SELECT value FROM metrics WHERE run = ? AND name = ? ORDER BY step DESC LIMIT 1"
    panels: dict[str, JsonObject] = {}
    for heading, beginnings in load_catalogue().health.items():
        if panel_names := [name for name in names if name.startswith(beginnings)]:
            constants = find_constants(summarize_values(query.database, [run.id], panel_names), [run.id])
            drawn = [name for name in panel_names if name not in constants][:MAX_HEALTH_CURVES]
            values = {name: query.select(last, run.id, name)[0]["value"] for name in drawn}
            panels[heading] = {"values": values, "constants": constants}
    return {"panels": panels, "warnings": _list_warnings(query, run.id, 100)}


def _list_warnings(query: Query, run: int, limit: int) -> list[sqlite3.Row]:
    return query.select("SELECT step, text FROM warnings WHERE run = ? ORDER BY step DESC LIMIT ?", run, limit)


def describe_config(query: Query) -> dict[str, object]:
    """Values of the page of a run's configuration: the values of its starts, those that are not defaults first."""
    run = query.run
    starts = list_config_starts(run.folder)
    history = read_history(run.folder)
    words = history[-1].command.split() if history else []
    typed = {word.lstrip("+~'\"").partition("=")[0] for word in words if "=" in word}
    chosen = read_set_keys(run.folder) or (starts[-1][1] if starts else {})
    rows = [
        (key, [values.get(key) for _, values in starts], key in typed)
        for key in sorted({key for _, values in starts for key in values})
    ]
    is_set = {key for key, values, is_typed in rows if is_typed or key in chosen or len(set(values)) > 1}
    return {
        "starts": [name for name, _ in starts],
        "set": [row for row in rows if row[0] in is_set],
        "defaults": [row for row in rows if row[0] not in is_set],
        "plan": read_run_plan(run.folder),
    }


def compare_runs(query: Query) -> dict[str, object]:
    """Values of the comparison of runs: their configurations side by side, and curves of the same metrics."""
    folders = read_folders(query.database, [int(run) for run in query.options.getlist("run")])
    if not (runs := [summarize_run(query, number, path) for number, path in folders.items()]):
        raise HTTPException(404, "Choose runs on the first page, then press Compare.")
    configs = [read_settings(run.folder) for run in runs]
    keys = sorted({key for config in configs for key in config})
    table = [(key, [config.get(key) for config in configs]) for key in keys]
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
        "differences": [row for row in table if len(set(row[1])) > 1],
        "same": [row for row in table if len(set(row[1])) == 1],
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
    metrics = {name: find_metric(f"accuracy/{name}") for name in ACCURACIES}
    meanings = {name: metric.text.meaning for name, metric in metrics.items() if metric}
    return {"accuracies": meanings, "rounds": rounds, "verdicts": verdicts, "report": report}


def list_problems(query: Query) -> dict[str, object]:
    """Values of the table of an evolution's problems."""
    return query.select_page(PROBLEMS, (query.run.id,), PROBLEM_COLUMNS, "problem")


def describe_problem(query: Query) -> dict[str, object]:
    """Values of the page of a problem: its candidates with their votes and reports, best first."""
    run, problem = query.run, query.place["problem"]
    rows = query.select("SELECT offset, bytes FROM pool WHERE run = ? AND problem = ? ORDER BY offset", run.id, problem)
    if not rows:
        raise HTTPException(404, f"{run.name} has no candidates of problem {problem}.")
    records: defaultdict[str, list[JsonObject]] = defaultdict(list)
    with open_regular(run.folder / "pool.jsonl") as file:
        for row in rows:
            file.seek(row["offset"])
            record = parse_json(file.read(row["bytes"]))
            records[record["kind"]].append(record)
    result = read_json_object(run.folder / f"problems/{problem:06}.json")
    judgements = {judgement["candidate"]: judgement for judgement in records["judgement"]}

    def rank(candidate: JsonObject) -> tuple[bool, int]:
        votes = judgements.get(candidate["key"], {"votes_for": 0, "votes_against": 0})
        return candidate["key"] != result.get("chosen"), votes["votes_against"] - votes["votes_for"]

    candidates = sorted(records["candidate"], key=rank)
    return {
        "problem": problem,
        "result": result,
        "prompt": candidates and candidates[0]["messages"][: candidates[0].get("num_prompt_messages", 1)],
        "candidates": candidates,
        "judgements": judgements,
        "neighbors": query.find_neighbors("pool", "problem", run=run.id, problem=problem),
    }
