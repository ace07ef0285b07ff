"""A file a problem, problems/ID.json: its answer, and all that led to it, without the single calls (pool.jsonl has
them)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from alphaapollo.evolving.pool import Pool
from alphaapollo.evolving.records import Candidate
from alphaapollo.evolving.report import make_report, print_report, write_report
from alphaapollo.observability.disk import writing
from alphaapollo.observability.terminal import Terminal
from alphaapollo.types import Prompt

FOLDER = "problems"


def write_results(pool: Pool, prompts: Sequence[Prompt], folder: Path, halted: str, terminal: Terminal) -> None:
    """Everything that is made from the pool; made anew each time."""
    with writing("the results", folder / FOLDER):
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)
        for prompt in prompts:
            path = folder / FOLDER / f"{prompt.id:06}.json"
            part = path.with_name(f".{path.name}.part")
            part.write_text(
                json.dumps(problem_result(pool, prompt), indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
            )
            part.replace(path)
    report = make_report(pool, [prompt.id for prompt in prompts], halted)
    path = write_report(report, folder)
    print_report(report, terminal)
    terminal.print(f"written: {path}, {folder / FOLDER}", markup=False, soft_wrap=True)


def problem_result(pool: Pool, prompt: Prompt) -> dict[str, Any]:
    """One problem, with its candidates in the order of rounds."""
    choice = pool.choices.get(prompt.id)
    chosen = pool.candidates[choice.candidate] if choice and choice.candidate else None
    own = [one for one in pool.candidates.values() if one.place.problem == prompt.id]
    own.sort(key=lambda one: (one.place.round, one.place.branch, one.place.index))
    return {
        "problem": prompt.id,
        "data_source": prompt.data_source,
        "prompt": prompt.content,
        "ground_truth": prompt.ground_truth,
        "chosen": chosen.key if chosen else None,
        "how": choice.how if choice else None,
        "answer": chosen.answer if chosen else None,
        "solution": chosen.summary if chosen else None,
        "right": chosen.right if chosen else None,
        "candidates": [candidate_result(pool, one) for one in own],
        "matches": [
            msgspec.to_builtins(match) for (problem, _), match in sorted(pool.matches.items()) if problem == prompt.id
        ],
    }


def candidate_result(pool: Pool, candidate: Candidate) -> dict[str, Any]:
    """With its verdicts, and what all calls for it took."""
    spent = pool.spent[candidate.key]
    judgement = pool.judgements.get(candidate.key)
    fields = msgspec.to_builtins(candidate)
    del fields["messages"], fields["asked"], fields["tokens"], fields["money"]
    return {
        **fields,
        "right": candidate.right,
        "verdicts": [
            {"vote": one.vote, "upheld": one.upheld, "report": one.report, "failure": one.failure}
            for one in pool.verdicts_of(candidate.key)
        ],
        "judgement": None if judgement is None else msgspec.to_builtins(judgement),
        "calls": spent.calls,
        "tokens": spent.tokens,
        "money": spent.money,
    }
