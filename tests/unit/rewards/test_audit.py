"""The audit command and its parts."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scripts.grader_audit import compare_score_with_label, read_labelled_answers

from alphaapollo.rewards.base import make_failed_score
from alphaapollo.types import Outcome, Score

ROOT = Path(__file__).resolve().parents[3]
SOLUTIONS = ROOT / "../shared/data/gsm8k_model_solutions.jsonl"

pytestmark = pytest.mark.timeout(90)

ROWS = [
    {"data_source": "gsm8k", "response": "#### 4", "ground_truth": "4", "is_correct": True},
    {"data_source": "gsm8k", "response": "#### 5", "ground_truth": "4", "is_correct": False},
    {"data_source": "gsm8k", "response": "#### 4", "ground_truth": "4", "is_correct": False},
    {"data_source": "gsm8k", "response": "no idea \ud83d", "ground_truth": "4", "is_correct": True},
    {"data_source": "gsm8k", "response": "#### 4", "ground_truth": "none", "is_correct": True},
    {"data_source": "math", "response": r"\\boxed{0.5}", "ground_truth": 0.5, "is_correct": 1},
]
COUNTS = {"rows": 6, "agreement": 0.5, "false_positives": 1, "false_negatives": 1, "failures": 1}


def write(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def run(*args):
    command = [sys.executable, "-m", "scripts.grader_audit", *map(str, args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_last_line_has_the_counts_and_disagreements_are_listed(tmp_path):
    done = run(write(tmp_path / "rows.jsonl", ROWS), "--json")
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    counts = json.loads(last)
    assert list(counts) == [*COUNTS, "rows_per_s"] and counts.pop("rows_per_s") > 0
    assert counts == COUNTS
    text = "\n".join(lines)
    assert "row 2, false positive\n  truth  4\n  answer 4" in text
    assert "row 3, false negative: no number in the answer\n  truth  4\n  answer no idea \\ud83d" in text
    assert "row 4, failure: the reward function failed: ValueError: the ground truth 'none' has no number" in text
    assert "row 0" not in text and lines[-1].startswith("6 rows, agreement 50.00%, 1 false positives")


def test_parquet_without_json_and_another_data_source(tmp_path):
    rows = [{**row, "data_source": None, "ground_truth": str(row["ground_truth"])} for row in ROWS[:2]]
    for row in rows:
        row["is_correct"] = bool(row["is_correct"])
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    done = run(tmp_path / "rows.parquet", "--data_source", "math")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("2 rows, agreement 100.00%")


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"data_source": "gsm8k"}, "3 invalid values, first in row 0, response: Field required"),
        ({**ROWS[0], "is_correct": "perhaps"}, "row 0, is_correct: Input should be a valid boolean"),
        ({**ROWS[0], "response": ["4"]}, "row 0, response: Input should be a valid string"),
        ({**ROWS[0], "ground_truth": None}, "row 0, ground_truth: Input should be a valid string"),
        ({**ROWS[0], "data_source": "poems"}, "no reward function for data_source 'poems'"),
        ([1], "row 0: Input should be a valid dictionary"),
    ],
)
def test_bad_rows_are_named(tmp_path, row, what):
    with pytest.raises(ValueError, match=what):
        read_labelled_answers(str(write(tmp_path / "rows.jsonl", [row])))


@pytest.mark.parametrize(("text", "what"), [("", "has no rows"), ("{", "not a readable"), (None, "not a readable")])
def test_unreadable_files_are_one_line(tmp_path, text, what):
    path = tmp_path / "rows.jsonl"
    if text is not None:
        path.write_text(text)
    done = run(path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and what in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("is_correct", "score", "kind"),
    [
        (True, Score(1.0), "agreement"),
        (False, Score(0.0, {}, Outcome.WRONG_FORMAT, "empty"), "agreement"),
        (True, Score(0.3, {"accuracy": 0.0}), "false negative"),
        (False, Score(0.3, {"accuracy": 1.0}), "false positive"),
        (False, make_failed_score("it hung"), "failure"),
    ],
)
def test_scores_are_compared_with_labels(is_correct, score, kind):
    assert compare_score_with_label(is_correct, score) == kind


@pytest.mark.skipif(not SOLUTIONS.exists(), reason="the labelled GSM8K solutions are not at hand")
@pytest.mark.parametrize("data_source", ["gsm8k", "math"])
def test_both_graders_agree_with_all_labelled_solutions(tmp_path, data_source):
    rows = []
    for line in SOLUTIONS.read_text(encoding="utf-8").splitlines():
        problem = json.loads(line)
        truth = problem["ground_truth"].rpartition("A:")[2].strip()
        for solution in (value for value in problem.values() if isinstance(value, dict)):
            row = {"response": solution["solution"], "ground_truth": truth, "is_correct": solution["is_correct"]}
            rows.append({"data_source": data_source, **row})
    done = run(write(tmp_path / "rows.jsonl", rows), "--json")
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout.splitlines()[-1])
    del counts["rows_per_s"]
    assert counts == {"rows": 5276, "agreement": 1.0, "false_positives": 0, "false_negatives": 0, "failures": 0}
