"""Make warm-up data: the prompts of the prepared parquet with the human solutions and boxed answers.

python -m examples.gsm8k.make_sft_data --data train.parquet --text gsm8k_train.jsonl --out sft.parquet
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pandas as pd

CALCULATOR = re.compile(r"<<[^>]*>>")


def solution(answer: str) -> str:
    """GSM8K's answer without calculator marks, ending with the box that the prompt asks for."""
    steps, _, result = answer.rpartition("####")
    return CALCULATOR.sub("", steps).strip() + f"\n\\boxed{{{result.strip()}}}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    answers = pd.read_json(args.text, lines=True).set_index("question")["answer"]
    prompts = pd.read_parquet(args.data)
    questions = [row["question"] for row in prompts["extra_info"]]
    pd.DataFrame(
        {"prompt": prompts["prompt"], "response": [solution(answers[question]) for question in questions]}
    ).to_parquet(args.out)
    print(f"{len(prompts)} examples in {args.out}")


if __name__ == "__main__":
    main()
