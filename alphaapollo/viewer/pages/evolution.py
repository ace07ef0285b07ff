"""Pages of a self-evolution run: accuracy by round, votes against grades, problems, and the candidates of a problem."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

from starlette.exceptions import HTTPException

from alphaapollo.utils.json_types import JsonObject
from alphaapollo.viewer.pages.query import Query
from alphaapollo.viewer.run_folders import read_json_object

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
        "matches": records["match"],
        "neighbors": query.find_neighbors("pool", "problem", run=run.id, problem=problem),
    }
