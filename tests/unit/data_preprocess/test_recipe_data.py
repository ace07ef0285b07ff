"""prepare_search, and prepare_code --repository."""

import json
import subprocess
from pathlib import Path

from tests.builders import write_rows
from tests.unit.data_preprocess.scripts import check_counts, made, refused

HUMANEVAL = {"prompt": "def f(x):\n", "test": "def check(c):\n    assert c(1) == 2\n", "entry_point": "f"}


def test_repositories_with_hidden_tests(tmp_path: Path):
    rows = [
        HUMANEVAL,
        {**HUMANEVAL, "buggy_solution": "    return x\n"},
        {"question": "Write f.", "test_cases": ["assert f(1) == 2"], "test_setup_code": "import math"},
        {"question": "Echo.", "tests": {"inputs": ["1\n"], "outputs": ["1\n"]}},
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
            done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=60, check=False)
            assert (done.returncode == 0) is passes, (solution, done)


def test_search_rows_and_corpus(tmp_path: Path):
    tea, milk = {"title": ["Tea"], "sentences": [["Tea is ", "brown."]]}, {"title": ["Milk"], "sentences": [["White."]]}
    both = {"title": ["Tea", "Milk"], "sentences": [["Tea is ", "brown."], ["White."]]}
    rows = [
        {"question": "What is brown?", "answer": "tea", "context": tea, "level": "easy"},
        {"question": "Is milk white?", "answer": "yes", "context": both},
        {"question": "What is white?", "context": milk},
        {"question": "What is black?", "answer": "coffee"},
        {"question": "What is black?", "answer": "coffee", "context": {"title": ["\ud83d"], "sentences": [["x"]]}},
    ]
    written, said = made("prepare_search", tmp_path, write_rows(tmp_path / "hotpot_train.jsonl", rows))
    check_counts(said, 2, {"no answer (": 1, "no passages (column context": 1, "not valid Unicode": 1})
    assert [row["reward_model"]["ground_truth"] for row in written] == ["tea", "yes"]
    assert {row["data_source"] for row in written} == {"hotpot"}
    assert written[0]["env_kwargs"]["question"] == "What is brown?"
    assert json.loads(written[0]["metadata"]) == {"level": "easy"}
    lines = (tmp_path / "out" / "corpus" / "passages.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"contents": "Tea\nTea is brown."}, {"contents": "Milk\nWhite."}]
    assert "2 passages" in said


def test_search_data_without_passages_is_refused(tmp_path: Path):
    rows = [{"question": "What is black?", "answer": "coffee"}]
    assert "no usable row" in refused("prepare_search", tmp_path, rows)
