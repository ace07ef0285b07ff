r"""Prepare RL data from code problems with tests, for the `code` grader.

    python -m examples.data_preprocess.prepare_code --data_source HumanEval.jsonl.gz

Supports the columns of HumanEval (test, entry_point, prompt), MBPP (test_list), APPS and TACO (input_output), and
`tests`: a list of asserts, or {inputs, outputs} with an optional entry_point. Writes <local_dir>/<split>.parquet; the
ground truth is JSON (docs/rewards.md).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from alphaapollo.data.files import DataRow
from alphaapollo.rewards.code.test_cases import read_tests_and_time_limit
from examples.data_preprocess.columns import QUESTION_KEYS, Dropped, Problem, as_text, find_text, is_unicode
from examples.data_preprocess.common import (
    convert,
    data_source_of,
    finish,
    output_folder,
    read_splits,
    rl_row,
    run,
    source_name,
    source_parser,
)

TEXT_KEYS = ("text", *QUESTION_KEYS)  # MBPP's
SOLUTION_KEYS = ("canonical_solution", "code", "solution", "solutions", "answer")
TEST_KEYS = ("test", "test_list", "input_output", "tests")
COMPLETE = "Complete this Python function. Answer with the whole function in one ```python block.\n\n```python\n{}\n```"
SOLVE = "{}\n\nAnswer with a Python program in one ```python block."
LONGEST_ASSERT = 400  # characters of the test in the prompt, which shows the expected names


def code_problem(row: DataRow) -> tuple[str, dict[str, Any]]:
    """(question, tests) of a row in any of the formats. Raises Dropped if one is missing."""
    present = [key for key in TEST_KEYS if row.get(key)]
    if not present:
        raise Dropped(f"no tests (looked for {', '.join(TEST_KEYS)})")
    if present[0] == "test":
        _, prompt = find_text(row, ["prompt"], "question")
        prompt = row["prompt"] if isinstance(row["prompt"], str) else prompt  # keep its last line break
        tests = {"test": row["test"], "entry_point": row.get("entry_point"), "prompt": prompt}
        return COMPLETE.format(prompt.strip("\n")), tests
    _, question = find_text(row, TEXT_KEYS, "question")
    tests = _given_tests(row, present[0])
    if starter := as_text(row.get("starter_code")):
        if not is_unicode(starter):
            raise Dropped("the question is not valid Unicode (column starter_code)")
        question += f"\n\nBegin with:\n```python\n{starter}\n```"
    if asserts := tests.get("asserts"):
        question += f"\n\nYour code should pass this test:\n```python\n{asserts[0][:LONGEST_ASSERT]}\n```"
    return SOLVE.format(question), tests


def _given_tests(row: DataRow, key: str) -> dict[str, Any]:
    value = row[key]
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise Dropped(f"the tests are not JSON (column {key})") from error
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        imports = row.get("test_imports")
        setup = "\n".join(map(str, imports)) if isinstance(imports, list) else row.get("test_setup_code")
        return {"asserts": value, "setup": setup or ""}
    if not isinstance(value, dict) or not {"inputs", "outputs"} <= value.keys():
        raise Dropped(f"the tests are neither asserts nor inputs and outputs (column {key})")
    outputs = value["outputs"]
    entry = value.get("fn_name") or value.get("entry_point")
    if entry and isinstance(outputs, list) and all(isinstance(one, list) and len(one) == 1 for one in outputs):
        outputs = [one[0] for one in outputs]  # APPS wraps each result
    tests = {"inputs": value["inputs"], "outputs": outputs}
    return {**tests, "entry_point": entry} if entry else tests


def solution_of(row: DataRow) -> str:
    """Reference solution, if there is one."""
    for key in SOLUTION_KEYS:
        value = row.get(key)
        if key == "solutions" and isinstance(value, str):  # a list in JSON
            with contextlib.suppress(ValueError):
                value = json.loads(value)
        if isinstance(value, list) and value:
            value = value[0]
        if isinstance(value, str) and value.strip() and is_unicode(value):
            return value
    return ""


def prepare(source: str, folder: Path, splits: Sequence[str], config_name: str | None) -> None:
    """Write each split of the source. Raises ValueError if it cannot be read or has no usable row."""
    data_source = data_source_of(source, fallback="code")
    for split, rows in read_splits(source, splits, config_name).items():

        def make(row: DataRow, index: int, split: str = split) -> DataRow:
            question, tests = code_problem(row)
            try:
                truth = json.dumps(tests, ensure_ascii=False)
                read_tests_and_time_limit(truth)
            except (TypeError, ValueError) as error:
                raise Dropped("the tests cannot be read") from error
            if not is_unicode(truth):
                raise Dropped("the tests are not valid Unicode")
            used = (*TEXT_KEYS, *TEST_KEYS, *SOLUTION_KEYS)
            metadata = {key: value for key, value in row.items() if key not in used}
            return rl_row(
                Problem(question, truth, solution_of(row), metadata), question, data_source, "code", split, index
            )

        made, count = convert(rows, make, split)
        finish(made, count, folder / f"{split}.parquet", f"data_source {data_source}")


def main() -> None:
    args = source_parser(__doc__).parse_args()
    folder = output_folder(args.local_dir, f"code/{source_name(args.data_source)}")
    run(lambda: prepare(args.data_source, folder, args.splits, args.config_name))


if __name__ == "__main__":
    main()
