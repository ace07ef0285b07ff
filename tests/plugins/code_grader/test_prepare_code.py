"""The script that writes code problems: examples/data_preprocess/prepare_code.py."""

import json
import subprocess

from alphaapollo.processes.python_command import make_subprocess_environ
from tests.unit.data_preprocess.scripts import DIRTY, check_counts, made
from tests.unit.data_preprocess.test_problem_scripts import truths

HUMANEVAL = {"prompt": "def f(x):\n", "test": "def check(c):\n    assert c(1) == 2\n", "entry_point": "f"}
PAIRS = {"inputs": ["1\n"], "outputs": ["1\n"]}


def test_code_formats(tmp_path):
    rows = [
        {**HUMANEVAL, "canonical_solution": "    return x\n", "task_id": "t"},
        {"text": "Write f.", "test_list": ["assert f(1) == 1"], "test_setup_code": "import math", "code": "def f"},
        {"question": "Echo.", "input_output": json.dumps(PAIRS), "solutions": json.dumps(["print(input())"])},
        {"question": "Same.", "tests": {"inputs": [[1], [2]], "outputs": [[1], [2]], "fn_name": "same"}},
        {"question": "No tests."},
        {"question": "Broken.", "tests": "{"},
        {"question": "Odd.", "tests": [1, 2]},
        {"question": "Uneven.", "tests": {"inputs": ["1"], "outputs": []}},
        {"question": "No call.", "test_list": ["assert 1 == 1"]},
        {**HUMANEVAL, "entry_point": None},
        {**HUMANEVAL, "prompt": None},
        {"text": "Odd setup.", "test_list": ["assert f(1) == 1"], "test_setup_code": 5},
        {"question": "Half a pair.", "tests": PAIRS, "starter_code": "\ud83d"},
        *DIRTY,
    ]
    written, said = made("prepare_code", tmp_path, rows)
    assert [row["extra_info"]["index"] for row in written] == [0, 1, 2, 3, 8, 9]  # a run reports the last two
    assert {row["data_source"] for row in written} == {"code/x"}
    asserts = {"asserts": ["assert f(1) == 1"], "setup": "import math"}
    called = {"inputs": [[1], [2]], "outputs": [1, 2], "entry_point": "same"}
    assert [json.loads(truth) for truth in truths(written)[:4]] == [HUMANEVAL, asserts, PAIRS, called]
    solutions = [row["extra_info"]["gt_traj"] for row in written]
    assert solutions == ["    return x\n", "def f", "print(input())", "", "", ""]
    assert "assert f(1) == 1" in written[1]["prompt"][0]["content"]
    reasons = {"no tests": 8, "cannot be read": 2, "not JSON": 1, "neither asserts": 1, "(looked for prompt)": 1}
    check_counts(said, 6, {**reasons, "not valid Unicode": 2})


def test_repositories_with_hidden_tests(tmp_path):
    rows = [
        HUMANEVAL,
        {**HUMANEVAL, "buggy_solution": "    return x\n"},
        {"question": "Write f.", "test_cases": ["assert f(1) == 2"], "test_setup_code": "import math"},
        {"question": "Echo.", "tests": PAIRS},
    ]
    written, said = made("prepare_code", tmp_path, rows, "--repository")
    check_counts(said, 3, {"neither asserts nor a function check": 1})
    files = [row["env_kwargs"]["files"] for row in written]
    assert files == [{"solution.py": text} for text in ("def f(x):\n", "def f(x):\n    return x\n", "")]
    asked = [row["prompt"][0]["content"] for row in written]
    assert asked[0] == asked[1] and "solution.py, or repair it" in asked[0] and "```python\ndef f(x):\n```" in asked[0]
    assert asked[2].endswith("assert f(1) == 2\n```\n\nWrite the program to solution.py.")
    for row in written:
        for solution, passes in (
            ("def f(x):\n    return x + 1\n", True),
            ("def f(x):\n    return x\n", False),
            ("import os\nos._exit(0)\n", False),
            ("print('passed')\nraise SystemExit\n", False),
            ("", False),
        ):
            (tmp_path / "solution.py").write_text(solution)
            command = ["bash", "-c", row["env_kwargs"]["test"]]
            done = subprocess.run(command, cwd=tmp_path, env=make_subprocess_environ(), capture_output=True, timeout=60)
            assert (done.returncode == 0) is passes, (solution, done)
