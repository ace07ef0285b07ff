"""Export an evolution as training data, in the columns of docs/data.md:

    python -m alphaapollo.evolving.export RUN OUT [--by truth|votes] [--max_pairs 4]

    sft.parquet          messages                    right solutions with their prompts
    preference.parquet   prompt, chosen, rejected    a right and a wrong solution of the same problem
    verifier.parquet     prompt, reward_model        solutions to judge; the ground truth is whether they are right

--by decides which solutions are right: the reward function, or the verifiers' votes (without verifier.parquet).
To train a verifier with main_ppo, set custom_reward_function.path=alphaapollo/evolving/verifier_reward.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from alphaapollo.config.errors import report_error
from alphaapollo.evolving.pool import FILE, Candidate, Pool

By = Literal["truth", "votes"]
Row = dict[str, Any]


def make_rows(pool: Pool, by: By, max_pairs: int) -> dict[str, list[Row]]:
    """The rows of each file, by its name without the suffix."""
    rows: dict[str, list[Row]] = {"sft": [], "preference": [], "verifier": []}
    for problem in sorted({one.place.problem for one in pool.candidates.values()}):
        candidates = pool.candidates_of_problem(problem)
        right = [one for one in candidates if is_right(pool, one, by) is True]
        wrong = [one for one in candidates if is_right(pool, one, by) is False]
        rows["sft"] += [{"messages": list(one.messages), **_source(one)} for one in right]
        rows["preference"] += _pairs(candidates, right, wrong)[:max_pairs]
        rows["verifier"] += [row for one in candidates for row in _to_judge(pool, one) if by == "truth"]
    return rows


def is_right(pool: Pool, candidate: Candidate, by: By) -> bool | None:
    """None if unknown."""
    if by == "truth":
        return candidate.right
    judgement = pool.judgements.get(candidate.key)
    return judgement.right if judgement else None


def _pairs(candidates: Sequence[Candidate], right: Sequence[Candidate], wrong: Sequence[Candidate]) -> list[Row]:
    """All pairs; none if every candidate was shown past solutions, because then no plain prompt is known."""
    first = next((one for one in candidates if not one.parents), None)
    if first is None:
        return []
    prompt = list(first.messages[: first.num_prompt_messages])
    return [
        {
            "prompt": prompt,
            "chosen": list(good.messages[good.num_prompt_messages :]),
            "rejected": list(bad.messages[bad.num_prompt_messages :]),
            **_source(good),
        }
        for good, bad in product(right, wrong)
    ]


def _to_judge(pool: Pool, candidate: Candidate) -> list[Row]:
    """One row if a verifier was asked and the truth is known, else none."""
    prompt = next((verdict.messages for verdict in pool.verdicts_of(candidate.key) if verdict.messages), None)
    if prompt is None or candidate.right is None:
        return []
    truth = {"style": "rule", "ground_truth": "right" if candidate.right else "wrong"}
    return [{"prompt": list(prompt), "ability": "verification", "reward_model": truth, **_source(candidate)}]


def _source(candidate: Candidate) -> Row:
    place = candidate.place
    return {
        "data_source": "evolving",
        "extra_info": {"problem": place.problem, "round": place.round, "candidate": candidate.key},
    }


def export(run: Path, out: Path, by: By, max_pairs: int) -> dict[str, int]:
    """Write the files that have rows and return their numbers of rows.

    Raises:
        ValueError: the run has no pool, or no solution is known to be right or wrong.
    """
    if not (run / FILE).is_file():
        raise ValueError(f"{run} has no {FILE}. Give the folder of a run of alphaapollo.evolving.main.")
    rows = {name: own for name, own in make_rows(Pool(run), by, max_pairs).items() if own}
    if not rows:
        other = "votes" if by == "truth" else "truth"
        raise ValueError(f"{run}: --by {by} finds no solution that is known to be right or wrong. Try --by {other}.")
    out.mkdir(parents=True, exist_ok=True)
    for name, own in rows.items():
        pd.DataFrame(own).to_parquet(out / f"{name}.parquet")
    return {name: len(own) for name, own in rows.items()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--by", choices=["truth", "votes"], default="truth")
    parser.add_argument("--max_pairs", type=int, default=4, help="per problem")
    args = parser.parse_args(argv)
    try:
        counts = export(args.run, args.out, args.by, args.max_pairs)
    except (ValueError, OSError) as error:
        return report_error(error, 2)
    for name, count in counts.items():
        print(f"{args.out / name}.parquet: {count} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
