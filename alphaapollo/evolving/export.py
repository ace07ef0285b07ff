"""An evolution's pool as training data, in the columns of docs/data.md:

    python -m alphaapollo.evolving.export RUN OUT [--by truth|votes] [--max_pairs 4]

    sft.parquet          messages                    right solutions, as they were asked for
    preference.parquet   prompt, chosen, rejected    a right and a wrong solution of one problem
    verifier.parquet     prompt, reward_model        solutions to judge: the ground truth is whether they are right

Which are right: by the reward function, or by the verifiers' votes where there is no truth (no verifier.parquet then).
main_ppo trains a verifier on the last with custom_reward_function.path=alphaapollo/evolving/verifier_reward.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, Literal

import msgspec
import pandas as pd

from alphaapollo.config.errors import failed
from alphaapollo.evolving.pool import FILE, Pool
from alphaapollo.evolving.records import Candidate

By = Literal["truth", "votes"]
Row = dict[str, Any]
DATA_SOURCE = "evolving"


def rows_of(pool: Pool, by: By, max_pairs: int) -> dict[str, list[Row]]:
    """The rows of each file, by its name."""
    problems = sorted({one.place.problem for one in pool.candidates.values()})
    own = {problem: pool.of_problem(problem) for problem in problems}
    return {
        "sft": [_lesson(one) for made in own.values() for one in made if is_right(pool, one, by)],
        "preference": [row for made in own.values() for row in _pairs(pool, made, by)[:max_pairs]],
        "verifier": [row for made in own.values() for one in made for row in _to_judge(pool, one) if by == "truth"],
    }


def is_right(pool: Pool, candidate: Candidate, by: By) -> bool | None:
    """None: nobody knows."""
    if by == "truth":
        return candidate.right
    judgement = pool.judgements.get(candidate.key)
    return judgement.right if judgement else None


def _lesson(candidate: Candidate) -> Row:
    return {"messages": _chat(candidate.messages), **_facts(candidate)}


def _pairs(pool: Pool, candidates: Sequence[Candidate], by: By) -> list[Row]:
    """None where no solution was asked for without past ones: then nobody knows the bare question."""
    first = next((one for one in candidates if not one.parents), None)
    right, wrong = ([one for one in candidates if is_right(pool, one, by) is wanted] for wanted in (True, False))
    if first is None:
        return []
    prompt = _chat(first.messages[: first.asked])
    return [
        {
            "prompt": prompt,
            "chosen": _chat(good.messages[good.asked :]),
            "rejected": _chat(bad.messages[bad.asked :]),
            **_facts(good),
        }
        for good, bad in product(right, wrong)
    ]


def _to_judge(pool: Pool, candidate: Candidate) -> list[Row]:
    """One row, where a verifier was asked and the truth is known."""
    asked = next((one.messages for one in pool.verdicts_of(candidate.key) if one.messages), None)
    if asked is None or candidate.right is None:
        return []
    truth = "right" if candidate.right else "wrong"
    return [
        {
            "prompt": _chat(asked),
            "ability": "verification",
            "reward_model": {"style": "rule", "ground_truth": truth},
            **_facts(candidate),
        }
    ]


def _facts(candidate: Candidate) -> Row:
    place = candidate.place
    return {
        "data_source": DATA_SOURCE,
        "extra_info": {"problem": place.problem, "round": place.round, "candidate": candidate.key},
    }


def _chat(messages: Sequence[Any]) -> list[dict[str, str]]:
    return [dict(message) for message in msgspec.to_builtins(messages)]


def export(run: Path, out: Path, by: By, max_pairs: int) -> dict[str, int]:
    """Write what there is; the rows of each file. ValueError: no pool, or nothing in it to train on."""
    if not (run / FILE).is_file():
        raise ValueError(f"{run} has no {FILE}. Give the folder of a run of alphaapollo.evolving.main.")
    rows = {name: own for name, own in rows_of(Pool(run), by, max_pairs).items() if own}
    if not rows:
        raise ValueError(f"{run}: by {by} nothing in its pool is known to be right or wrong. Try the other --by.")
    out.mkdir(parents=True, exist_ok=True)
    for name, own in rows.items():
        pd.DataFrame(own).to_parquet(out / f"{name}.parquet")
    return {name: len(own) for name, own in rows.items()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--by", choices=["truth", "votes"], default="truth")
    parser.add_argument("--max_pairs", type=int, default=4, help="of one problem")
    args = parser.parse_args(argv)
    try:
        counts = export(args.run, args.out, args.by, args.max_pairs)
    except (ValueError, OSError) as error:
        return failed(error, 2)
    for name, count in counts.items():
        print(f"{args.out / name}.parquet: {count} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
