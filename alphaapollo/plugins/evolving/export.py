"""Export an evolution as training data, in the columns of docs/data.md:

    python -m alphaapollo.plugins.evolving.export RUN OUT [--by truth|votes] [--max_pairs 4]

    sft.parquet          messages                    right solutions with their prompts
    preference.parquet   prompt, chosen, rejected    a right and a wrong solution of the same problem
    verifier.parquet     prompt, reward_model        solutions to judge; the ground truth is whether they are right

--by selects which solutions count as right: by the reward function (truth), or by the verifiers' votes (votes, which
writes no verifier.parquet).
To train a verifier with main_ppo, set custom_reward_function.path=alphaapollo/plugins/evolving/verifier_reward.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import islice, product
from pathlib import Path
from typing import Literal

import pandas as pd

from alphaapollo.config.errors import report_error
from alphaapollo.plugins.evolving.pool import FILE, Pool
from alphaapollo.runs.checkpoint_folder import check_format
from alphaapollo.utils.hub import expand_home
from alphaapollo.utils.json_types import JsonObject

Criterion = Literal["truth", "votes"]


def make_training_rows(pool: Pool, criterion: Criterion, max_pairs: int) -> dict[str, list[JsonObject]]:
    """Return the rows of each parquet file: `sft`, `preference` and `verifier`."""
    rows: dict[str, list[JsonObject]] = {"sft": [], "preference": [], "verifier": []}
    for problem in sorted({candidate.position.problem for candidate in pool.candidates.values()}):
        candidates = pool.get_candidates(problem)
        answers: dict[bool | None, list[JsonObject]] = {True: [], False: [], None: []}  # by whether they are right
        for candidate in candidates:
            judgement = pool.judgements.get(candidate.key)
            info = {"problem": problem, "round": candidate.position.round}
            source = {"data_source": "evolving", "extra_info": info | {"candidate": candidate.key}}
            right = candidate.is_right if criterion == "truth" else judgement.is_accepted if judgement else None
            answers[right].append({"answer": list(candidate.messages[candidate.num_prompt_messages :])} | source)
            if right:
                rows["sft"].append({"messages": list(candidate.messages)} | source)
            verdicts = judgement.verdicts if judgement else ()
            prompt = next((verdict.messages for verdict in verdicts if verdict.messages), ())
            if criterion == "truth" and right is not None and prompt:
                truth = {"style": "rule", "ground_truth": "right" if right else "wrong"}
                rows["verifier"].append(
                    {"prompt": list(prompt), "ability": "verification", "reward_model": truth} | source
                )
        # all pairs have a prompt without past solutions
        first = next(
            (
                list(candidate.messages[: candidate.num_prompt_messages])
                for candidate in candidates
                if not candidate.parents
            ),
            None,
        )
        for good, bad in islice(product(answers[True], answers[False]), max_pairs if first else 0):
            pair = {"prompt": first, "chosen": good["answer"], "rejected": bad["answer"]}
            rows["preference"].append(pair | {name: good[name] for name in ("data_source", "extra_info")})
    return rows


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
    parser.add_argument("run", type=expand_home)
    parser.add_argument("out", type=expand_home)
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
