"""The audit command and its parts."""

import json
import re
from pathlib import Path

import pytest

from alphaapollo.plugins.grader_audit.command import compute_statistics, main, read_labelled_answers
from alphaapollo.rewards.base import make_failed_score
from alphaapollo.types import Score
from tests.builders import write_rows
from tests.mock_judge import MockJudge
from tests.processes import run_python

ROOT = Path(__file__).resolve().parents[3]


ROWS = [
    {"data_source": "gsm8k", "response": "#### 4", "ground_truth": "4", "is_correct": True},
    {"data_source": "gsm8k", "response": "#### 5", "ground_truth": "4", "is_correct": False},
    {"data_source": "gsm8k", "response": "#### 4", "ground_truth": "4", "is_correct": False},
    {"data_source": "gsm8k", "response": "no idea", "ground_truth": "4", "is_correct": True},
    {"data_source": "gsm8k", "response": "#### 4", "ground_truth": "none", "is_correct": True},
    {"data_source": "math", "response": r"\\boxed{0.5}", "ground_truth": 0.5, "is_correct": 1},
]
COUNTS = {"rows": 6, "failures": 1, "false_positives": 1, "false_negatives": 1, "agreement": 0.6}


def call(*args):
    """Call the command in this process. Returns the exit status or the error."""
    try:
        return main([*map(str, args)])
    except SystemExit as end:
        return end.code


def test_the_last_line_has_the_counts_and_disagreements_are_listed(tmp_path):
    done = run_python("-m", "alphaapollo.rewards.audit", str(write_rows(tmp_path / "rows.jsonl", ROWS)), "--json")
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    counts = json.loads(last)
    assert counts["rows_per_s"] > 0 and {name: counts[name] for name in COUNTS} == COUNTS
    text = "\n".join(lines)
    listed = re.findall(r"^row (\d+), ([\w ]+)[^\n]*\n +truth +(.*)\n +answer +(.*)", text, re.MULTILINE)
    assert listed[:2] == [("2", "false positive", "4", "4"), ("3", "false negative", "4", "no idea")]
    assert re.search(r"row 4, failure: .*ValueError: .*'none'", text) and len(re.findall("^row ", text, re.M)) == 3
    assert [float(n) for n in re.findall(r"\d+(?:\.\d+)?", lines[-2])] == [60.0, 95, 23.07, 88.24, 0.167]


BAD_ROWS = [
    ({"data_source": "gsm8k"}, "row 0: .*response=None"),
    ({**ROWS[0], "is_correct": "perhaps"}, "row 0: .*label='perhaps'"),
    ({**ROWS[0], "response": ["4"]}, r"row 0: .*response=\['4'\]"),
    ([1], "line 1: not an object"),
]


@pytest.mark.parametrize(("row", "what"), BAD_ROWS)
def test_bad_rows_are_named(tmp_path, row, what):
    with pytest.raises(ValueError, match=what):
        read_labelled_answers(write_rows(tmp_path / "rows.jsonl", [row]))


BAD_SETTINGS = [
    ({**ROWS[0], "data_source": "poems"}, [], "data_source 'poems'"),
    (ROWS[0], ["reward.timeou=3"], "reward.timeou (got 3): unknown key"),
    (ROWS[0], ["--data_source", "rubric"], "reward.judge.model"),
    ({"prompt": "?", "chosen": "a", "rejected": "b"}, [], "reward.judge.model"),
]


@pytest.mark.parametrize(("row", "args", "what"), BAD_SETTINGS)
def test_invalid_settings_are_one_line(tmp_path, row, args, what):
    error = call(write_rows(tmp_path / "rows.jsonl", [row]), *args)
    assert error.startswith("error: ") and what in error


def test_agreement_is_computed_without_failures():
    scores = [Score(1.0), Score(0.9), Score(0.3, {"accuracy": 0.0, "a": 1.0}), Score(0.0), make_failed_score("it hung")]
    found = compute_statistics(scores, [1.0, 0.0, 1.0, 0.2, 1.0])
    # verdicts 1 1 0 0 against labels 1 0 1 0: p_o = 2 / 4, p_e = 1/2 * 1/2 + 1/2 * 1/2
    assert (found["rows"], found["failures"], found["agreement"], found["kappa"]) == (5, 1, 0.5, 0.0)
    assert (found["false_positives"], found["false_negatives"]) == (1, 1)
    assert found["components"]["a"] == [1.0, None]


def test_kappa_correlation_and_interval():
    scores = [Score(value, {"half": value / 2}) for value in (1.0, 1.0, 1.0, 0.0)]
    found = compute_statistics(scores, [1.0, 1.0, 0.0, 0.0])
    # p_o = 3/4, p_e = 3/4 * 1/2 + 1/4 * 1/2 = 1/2; correlation (3/2 - 1) / sqrt(...) = 1 / sqrt(3)
    assert found["kappa"] == 0.5
    assert found["components"]["reward"] == pytest.approx([0.75, 3**-0.5])
    assert found["components"]["half"] == pytest.approx([0.375, 3**-0.5])
    # z = 1.96, 8 of 10: centre (.8 + z^2/20) / (1 + z^2/10) = .71674, half width .22659
    found = compute_statistics([Score(1.0)] * 10, [1.0] * 8 + [0.0] * 2)
    assert found["interval"] == pytest.approx([0.49016, 0.94332], abs=1e-5)
    assert compute_statistics([Score(1.0)] * 4, [0.0] * 4)["interval"][0] == pytest.approx(0.0)
    assert compute_statistics(scores[:2], [1.0, 1.0])["kappa"] is None  # all labels are equal
    assert "agreement" not in compute_statistics([make_failed_score("it hung")], [1.0])


def test_a_rubric_and_pairs_are_audited_against_a_server(tmp_path, monkeypatch, capsys):
    pytest.importorskip("openai")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")

    def reply(content):
        if "<answer_a>" in content:  # prefers "good"; decides between equal answers by position
            first, second = content.split("<answer_b>")
            return f"WINNER: {'A' if 'good' in first or 'good' not in second else 'B'}"
        return "?" if "hang" in content else json.dumps({"kind": int("good" in content), "1": 0})

    row = {"prompt": "Q?", "rubric": [{"text": "t", "weight": 1}]}
    rows = [{**row, "response": "good", "label": 1}, {**row, "response": "bad", "label": 0.3}]
    rows += [{**row, "response": "bad", "label": True}, {**row, "response": "hang", "label": 1}]
    pairs = [{"prompt": "Q?", "chosen": one, "rejected": two} for one, two in (("good", "bad"), ("bad", "worse"))]
    with MockJudge(reply).serve() as judge:
        settings = ["reward.judge.model=m", f"reward.judge.base_url={judge.url}", "--json"]
        rubric = ["--data_source", "rubric", "reward.rubric.criteria={kind: {text: It is kind, weight: 3}}"]
        assert call(write_rows(tmp_path / "rows.jsonl", rows), *settings, *rubric) == 0
        shown = capsys.readouterr().out
        assert call(write_rows(tmp_path / "pairs.jsonl", pairs), *settings) == 0
        shown_for_pairs = capsys.readouterr().out
    found = json.loads(shown.splitlines()[-1])
    assert (found["rows"], found["failures"], found["false_negatives"]) == (4, 1, 1)
    assert list(found["components"]) == ["reward", "rubric/kind"]
    assert re.search(r"1 failures: .*JSON object: '\?' \(in 2 replies\)", shown)
    found = json.loads(shown_for_pairs.splitlines()[-1])
    assert (found["agreement"], found["kappa"]) == (0.5, None)
    assert "50.0% of the pairs" in shown_for_pairs


def test_if_every_row_fails_the_exit_status_is_1(tmp_path, capsys):
    assert call(write_rows(tmp_path / "rows.jsonl", [ROWS[4]])) == 1
    assert re.search("^1 rows, 0 .* 0 .* 1 failures", capsys.readouterr().out, re.MULTILINE)
