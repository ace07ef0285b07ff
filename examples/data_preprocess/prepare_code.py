r"""Prepare RL data from code problems with tests, for the `code` grader.

    python -m examples.data_preprocess.prepare_code --data_source HumanEval.jsonl.gz

Supports the columns of HumanEval (test, entry_point, prompt), MBPP (test_list), AceCode (test_cases), APPS and TACO
(input_output), and `tests`: a list of asserts, or {inputs, outputs} with an optional entry_point. Writes
<local_dir>/<split>.parquet; the ground truth is JSON (docs/rewards.md).

With --repository, the rows are for coding agents (examples/agents/harnesses/mini_swe_agent.py): env_kwargs has the
files of a repository, in which the agent completes solution.py (or repairs it, with HumanEvalPack's column
buggy_solution), and the command of its hidden tests.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
from typing import Any

import pyarrow as pa

from alphaapollo.data.files import DataRow
from alphaapollo.plugins.code_grader.problem_tests import read_tests_and_time_limit
from examples.data_preprocess.columns import QUESTION_KEYS, Dropped, Problem, as_text, find_text, is_unicode
from examples.data_preprocess.common import RL_SCHEMA, MakeRow, Script, rl_row

TEXT_KEYS = ("text", *QUESTION_KEYS)  # MBPP's
SOLUTION_KEYS = ("canonical_solution", "code", "solution", "solutions", "answer")
TEST_KEYS = ("test", "test_list", "test_cases", "input_output", "tests")
COMPLETE = "Complete this Python function. Answer with the whole function in one ```python block.\n\n```python\n{}\n```"
SOLVE = "{}\n\nAnswer with a Python program in one ```python block."
COMPLETE_FILE = "Complete the function in solution.py, or repair it if it is wrong.\n\n```python\n{}\n```"
WRITE_FILE = "{}\n\nWrite the program to solution.py."
REPOSITORY = pa.struct({"files": pa.struct({"solution.py": pa.string()}), "test": pa.string()})
REPOSITORY_SCHEMA = RL_SCHEMA.set(RL_SCHEMA.get_field_index("env_kwargs"), pa.field("env_kwargs", REPOSITORY))
LONGEST_ASSERT = 400  # characters of the test in the prompt, which shows the expected names


def code_problem(row: DataRow, complete: str = COMPLETE, solve: str = SOLVE) -> tuple[str, dict[str, Any]]:
    """(question, tests) of a row in any of the formats. Raises Dropped if one is missing."""
    present = [key for key in TEST_KEYS if row.get(key)]
    if not present:
        raise Dropped(f"no tests (looked for {', '.join(TEST_KEYS)})")
    if present[0] == "test":
        _, prompt = find_text(row, ["prompt"], "question")
        prompt = row["prompt"] if isinstance(row["prompt"], str) else prompt  # keep its last line break
        tests = {"test": row["test"], "entry_point": row.get("entry_point"), "prompt": prompt}
        return complete.format(prompt.strip("\n")), tests
    _, question = find_text(row, TEXT_KEYS, "question")
    tests = _given_tests(row, present[0])
    if starter := as_text(row.get("starter_code")):
        if not is_unicode(starter):
            raise Dropped("the question is not valid Unicode (column starter_code)")
        question += f"\n\nBegin with:\n```python\n{starter}\n```"
    if asserts := tests.get("asserts"):
        question += f"\n\nYour code should pass this test:\n```python\n{asserts[0][:LONGEST_ASSERT]}\n```"
    return solve.format(question), tests


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


def make_repository(row: DataRow, tests: dict[str, Any]) -> dict[str, Any]:
    """The files of a coding task, and a command that succeeds if solution.py passes the tests: their last line prints a
    word that solution.py does not know. Raises Dropped for tests of a program's output."""
    if "inputs" in tests:
        raise Dropped("the tests are neither asserts nor a function check")
    lines = tests.get("asserts") or [tests.get("test"), f"check({tests['entry_point']})"]
    body = "\n".join(["from solution import *", tests.get("setup", ""), *lines])
    word = "passed-" + hashlib.sha256(body.encode()).hexdigest()[:16]
    command = f"python3 - <<'{word}' | grep -qx {word}\n{body}\nprint('{word}')\n{word}"
    bug = row.get("buggy_solution")
    return {"files": {"solution.py": tests.get("prompt", "") + (bug if isinstance(bug, str) else "")}, "test": command}


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


def code_row(args: argparse.Namespace, data_source: str, split: str) -> MakeRow:
    """Function that makes an RL row of a code problem. Raises Dropped for a row without usable tests."""

    def make(row: DataRow, index: int) -> DataRow:
        question, tests = code_problem(row, *((COMPLETE_FILE, WRITE_FILE) if args.repository else ()))
        try:
            truth = json.dumps(tests, ensure_ascii=False)
            read_tests_and_time_limit(truth)
        except (TypeError, ValueError) as error:
            raise Dropped("the tests cannot be read") from error
        if not is_unicode(truth):
            raise Dropped("the tests are not valid Unicode")
        used = (*TEXT_KEYS, *TEST_KEYS, *SOLUTION_KEYS)
        metadata = {key: value for key, value in row.items() if key not in used}
        new_row = rl_row(
            Problem(question, truth, solution_of(row), metadata), question, data_source, "code", split, index
        )
        return {**new_row, "env_kwargs": make_repository(row, tests)} if args.repository else new_row

    return make


main = Script(
    __doc__,
    code_row,
    {"--repository": {"action": "store_true", "help": "write rows for coding agents"}},
    fallback="code",
    folder="code/{}",
    schema=lambda args: REPOSITORY_SCHEMA if args.repository else RL_SCHEMA,
    has_columns=False,
).main

if __name__ == "__main__":
    main()
