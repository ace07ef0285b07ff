"""Export an evolution as training data, in the columns of docs/data.md:

    python -m alphaapollo.evolving.export RUN OUT [--by truth|votes] [--max_pairs 4]

    sft.parquet          messages                    right solutions with their prompts
    preference.parquet   prompt, chosen, rejected    a right and a wrong solution of the same problem
    verifier.parquet     prompt, reward_model        solutions to judge; the ground truth is whether they are right

--by selects which solutions count as right: by the reward function (truth), or by the verifiers' votes (votes, which
writes no verifier.parquet).
To train a verifier with main_ppo, set custom_reward_function.path=alphaapollo/evolving/verifier_reward.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Literal

import pandas as pd

from alphaapollo.config.errors import report_error
from alphaapollo.evolving.pool import FILE, Candidate, Pool
from alphaapollo.runs.checkpoint_folder import check_format
from alphaapollo.utils.json_types import JsonObject

Criterion = Literal["truth", "votes"]
Row = JsonObject


def make_training_rows(pool: Pool, criterion: Criterion, max_pairs: int) -> dict[str, list[Row]]:
    """Return the rows of each parquet file: `sft`, `preference` and `verifier`."""
    rows: dict[str, list[Row]] = {"sft": [], "preference": [], "verifier": []}
    for problem in sorted({one.id.problem for one in pool.candidates.values()}):
        candidates = pool.get_candidates(problem)
        right = [one for one in candidates if is_right(pool, one, criterion) is True]
        wrong = [one for one in candidates if is_right(pool, one, criterion) is False]
        rows["sft"] += [{"messages": list(one.messages), **_get_source_fields(one)} for one in right]
        rows["preference"] += _make_preference_rows(candidates, right, wrong)[:max_pairs]
        rows["verifier"] += [
            row for one in candidates for row in _make_verifier_rows(pool, one) if criterion == "truth"
        ]
    return rows


def is_right(pool: Pool, candidate: Candidate, criterion: Criterion) -> bool | None:
    """Whether a candidate is right by the ground truth or by the votes; None if this is unknown."""
    if criterion == "truth":
        return candidate.is_right
    judgement = pool.judgements.get(candidate.key)
    return judgement.is_accepted if judgement else None


def _make_preference_rows(
    candidates: Sequence[Candidate], right: Sequence[Candidate], wrong: Sequence[Candidate]
) -> list[Row]:
    """Return one row per pair of a right and a wrong solution. All rows have a prompt without past solutions."""
    first = next((one for one in candidates if not one.parents), None)
    if first is None:
        return []
    prompt = list(first.messages[: first.num_prompt_messages])
    return [
        {
            "prompt": prompt,
            "chosen": list(good.messages[good.num_prompt_messages :]),
            "rejected": list(bad.messages[bad.num_prompt_messages :]),
            **_get_source_fields(good),
        }
        for good, bad in product(right, wrong)
    ]


def _make_verifier_rows(pool: Pool, candidate: Candidate) -> list[Row]:
    """Return one row with a verifier's prompt for this candidate; none if the ground truth or the prompt is missing."""
    prompt = next((verdict.messages for verdict in pool.get_verdicts(candidate.key) if verdict.messages), None)
    if prompt is None or candidate.is_right is None:
        return []
    truth = {"style": "rule", "ground_truth": "right" if candidate.is_right else "wrong"}
    return [{"prompt": list(prompt), "ability": "verification", "reward_model": truth, **_get_source_fields(candidate)}]


def _get_source_fields(candidate: Candidate) -> Row:
    key = candidate.id
    return {
        "data_source": "evolving",
        "extra_info": {"problem": key.problem, "round": key.round, "candidate": candidate.key},
    }


def export_training_rows(run_folder: Path, output_folder: Path, criterion: Criterion, max_pairs: int) -> dict[str, int]:
    """Write the parquet files of a run, and return the number of rows of each file. Raises ValueError if there
    are no rows to write, because the run has no pool or the criterion cannot tell which solutions are right."""
    check_format(run_folder)
    if not (run_folder / FILE).is_file():
        raise ValueError(f"{run_folder} has no {FILE}. Set RUN to the folder of a run of alphaapollo.evolving.main.")
    rows = make_training_rows(Pool(run_folder), criterion, max_pairs)
    if not any(rows.values()):
        other = "votes" if criterion == "truth" else "truth"
        raise ValueError(f"--by {criterion} cannot tell which solutions in {run_folder} are right. Use --by {other}.")
    output_folder.mkdir(parents=True, exist_ok=True)
    counts = {name: len(file_rows) for name, file_rows in rows.items() if file_rows}
    for name in counts:
        pd.DataFrame(rows[name]).to_parquet(output_folder / f"{name}.parquet")
    return counts


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--by", choices=["truth", "votes"], default="truth")
    parser.add_argument("--max_pairs", type=int, default=4, help="per problem")
    args = parser.parse_args(argv)
    try:
        counts = export_training_rows(args.run, args.out, args.by, args.max_pairs)
    except (ValueError, OSError) as error:
        return report_error(error, 2)
    for name, count in counts.items():
        print(f"{args.out / name}.parquet: {count} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
