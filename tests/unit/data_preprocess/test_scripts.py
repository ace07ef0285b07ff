"""The scripts that write problems: prepare, _informal_math, _validation, _custom, _single_question and _code."""

import gzip
import json
import re
import subprocess
import sys

import pytest

from alphaapollo.data.prompts import load_prompts
from tests.builders import write_rows
from tests.unit.data_preprocess.scripts import DATA, DIRTY, GOOD, REASONS, ROOT, check_counts, made, refused


def test_gsm8k_as_a_command(tmp_path):
    command = [sys.executable, "-m", "examples.data_preprocess.prepare_informal_math", "--val_size", "2"]
    command += ["--data_source", str(DATA / "gsm8k_train.jsonl"), "--local_dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "(data_source gsm8k): 8 rows kept, 0 dropped" in done.stdout
    train, val = (load_prompts(str(tmp_path / f"{split}.parquet"), "prompt") for split in ("train", "val"))
    assert (len(train), len(val)) == (8, 2)
    assert train[0].ground_truth == "72"
    assert train[0].content[0]["content"].startswith("Natalia sold clips")
    assert not {p.extra_info["question"] for p in train} & {p.extra_info["question"] for p in val}


def test_dirty_rows_are_dropped_and_counted(tmp_path):
    rows = [{"question": "1+1?", "answer": r"\boxed{2}"}, {"answer": "no question"}, {"question": 5, "answer": 5}]
    written, said = made("prepare_informal_math", tmp_path, [*rows, *DIRTY[:-1]])
    check_counts(said, 3, REASONS | {"no question": 2})
    prompts = load_prompts(str(tmp_path / "out" / "train.parquet"), "prompt")
    assert [prompt.ground_truth for prompt in prompts] == ["2", "5", "3"]
    assert {row["data_source"] for row in written} == {"math/x"}


ONE = '{"question": "q", "answer": "1"}'


@pytest.mark.parametrize(
    ("text", "args", "facts"),
    [
        ('{"x": 1}', [], ["train", "0 rows kept, 1 dropped"]),
        ('{"question": "q"', [], ["1 dropped: not valid JSON"]),
        ("", [], ["x.jsonl", "no rows"]),
        (ONE, ["--val_size", "5"], ["train", "only 1 rows"]),
        (ONE, ["--val_size", "-5"], ["--val_size -5", "negative"]),
        (ONE, ["--local_dir", "/dev/null"], ["/dev/null", "cannot be written"]),
    ],
)
def test_an_unusable_source_is_an_error(tmp_path, text, args, facts):
    (tmp_path / "x.jsonl").write_text(text)
    error = refused("prepare_informal_math", tmp_path, tmp_path / "x.jsonl", *args)
    assert all(fact in error for fact in facts), error


def test_seed_rows_for_environments(tmp_path):
    made("prepare", tmp_path, None, "--mode", "text", "--train_data_size", 16, "--val_data_size", 128, split="val")
    train, test = (load_prompts(str(tmp_path / f"out/{split}.parquet"), "prompt") for split in ("train", "val"))
    assert (len(train), len(test)) == (16, 128)
    assert len({prompt.env_kwargs["seed"] for prompt in train + test}) == 144
    assert train[3].data_source == "text" and train[3].extra_info == {"split": "train", "index": 3}


def test_no_rows_requested_is_an_error(tmp_path):
    assert "train is 0" in refused("prepare", tmp_path, None, "--train_data_size", 0)


def test_validation_repeats_each_source_and_writes_what_came_from_where(tmp_path):
    one = write_rows(tmp_path / "aime_test.jsonl", [GOOD, {"problem": "2+2?", "solution": r"\boxed{4}"}])
    two = write_rows(tmp_path / "other_test.jsonl", [*DIRTY, GOOD])
    rows, said = made("prepare_validation", tmp_path, None, "--data_sources", one, two, "--repeat", 2, 3, split="test")
    assert [(row["data_source"], row["extra_info"]["index"]) for row in rows] == (
        [("aime", 0)] * 2 + [("aime", 1)] * 2 + [("math/other", index) for index in (6, 7, 8) for _ in range(3)]
    )
    assert "(aime, math/other)" in said
    check_counts(said, 13, REASONS)
    info = json.loads((tmp_path / "out" / "test_info.json").read_text())
    assert (info["split"], info["rows"]) == ("test", 13)
    counts = {"problems": 2, "repeat": 2, "rows": 4, "dropped": {}}
    assert info["sources"][0] == {"data_source": "aime", "source": str(one), **counts}
    assert sum(info["sources"][1]["dropped"].values()) == 6


@pytest.mark.parametrize(
    ("repeat", "name", "what"),
    [([1, 2, 3], "b_test.jsonl", "2 sources"), ([0], "b_test.jsonl", "give one number"), ([1], "a_test.json", "name")],
)
def test_validation_refuses(tmp_path, repeat, name, what):
    sources = [write_rows(tmp_path / one, [GOOD]) for one in ("a_test.jsonl", name)]
    assert what in refused("prepare_validation", tmp_path, None, "--data_sources", *sources, "--repeat", *repeat)


def test_validation_of_gsm8k_and_rows_in_the_layout_of_svamp(tmp_path):
    oranges = {"Body": "87 oranges and 290 bananas", "Question": "How many fruits?"}
    svamp = write_rows(tmp_path / "svamp_test.jsonl", [{**oranges, "Equation": "( 87 + 290 )", "Answer": 377.0}])
    sources = [DATA / "gsm8k_test.jsonl", svamp]
    rows, said = made("prepare_validation", tmp_path, None, "--data_sources", *sources, "--repeat", 1, 2, split="test")
    check_counts(said, 6 + 2, {})
    assert rows[0]["data_source"] == "gsm8k" and rows[0]["reward_model"]["ground_truth"] == "18"
    assert rows[6]["data_source"] == "svamp" and rows[6]["reward_model"]["ground_truth"] == "377"
    assert rows[6]["extra_info"]["question"] == "87 oranges and 290 bananas. How many fruits?"


def test_custom_takes_the_chosen_rows(tmp_path):
    source = [{**GOOD, "level": index} for index in range(6)]
    rows, _ = made("prepare_custom", tmp_path, source, "--sample_indices", "4,0-1")
    assert [(row["extra_info"]["index"], json.loads(row["metadata"])["level"]) for row in rows] == [
        (4, 4),
        (0, 0),
        (1, 1),
    ]
    rows, said = made("prepare_custom", tmp_path, [GOOD, *DIRTY], "--sample_indices", "0-5")
    check_counts(said, 1, {name: count for name, count in REASONS.items() if name != "not valid Unicode"})


@pytest.mark.parametrize("indices", ["0,9", "0-99999999999", "a", "3-1", "1,"])
def test_custom_refuses_other_indices(tmp_path, indices):
    error = refused("prepare_custom", tmp_path, [GOOD] * 6, "--sample_indices", indices)
    assert ("0 to 5" if "9" in indices else "not an index or range") in error


def test_custom_takes_one_split(tmp_path):
    for split in ("train", "test"):
        write_rows(tmp_path / f"{split}.jsonl", [GOOD])
    assert "--splits" in refused("prepare_custom", tmp_path, tmp_path)


def test_single_question(tmp_path):
    arguments = ["--question", "2+2?", "--ground_truth", r"so \boxed{4}"]
    (row,), _ = made("prepare_single_question", tmp_path, None, *arguments, "--splits", "train", "val", split="val")
    assert (row["data_source"], row["reward_model"]["ground_truth"]) == ("math", "4")
    assert row["prompt"][0]["content"].startswith("2+2?\n\nReason step by step")


def test_single_question_refuses(tmp_path):
    base = ["prepare_single_question", tmp_path, None, "--ground_truth", "4", "--question"]
    assert "poems" in refused(*base, "q", "--data_source", "poems")
    assert "empty" in refused(*base, " ")


def test_code_formats(tmp_path):
    humaneval = {"prompt": "def f(x):\n", "test": "def check(c):\n    assert c(1) == 1\n", "entry_point": "f"}
    pairs = {"inputs": ["1\n"], "outputs": ["1\n"]}
    rows = [
        {**humaneval, "canonical_solution": "    return x\n", "task_id": "t"},
        {"text": "Write f.", "test_list": ["assert f(1) == 1"], "test_setup_code": "import math", "code": "def f"},
        {"question": "Echo.", "input_output": json.dumps(pairs), "solutions": json.dumps(["print(input())"])},
        {"question": "Same.", "tests": {"inputs": [[1], [2]], "outputs": [[1], [2]], "fn_name": "same"}},
        {"question": "No tests."},
        {"question": "Broken.", "tests": "{"},
        {"question": "Odd.", "tests": [1, 2]},
        {"question": "Uneven.", "tests": {"inputs": ["1"], "outputs": []}},
        {"question": "No call.", "test_list": ["assert 1 == 1"]},
        {**humaneval, "entry_point": None},
        {**humaneval, "prompt": None},
        {"text": "Odd setup.", "test_list": ["assert f(1) == 1"], "test_setup_code": 5},
        {"question": "Half a pair.", "tests": pairs, "starter_code": "\ud83d"},
        *DIRTY,
    ]
    written, said = made("prepare_code", tmp_path, rows)
    assert [row["extra_info"]["index"] for row in written] == [0, 1, 2, 3, 8, 9]  # a run reports the last two
    assert {row["data_source"] for row in written} == {"code/x"}
    truths = [json.loads(row["reward_model"]["ground_truth"]) for row in written]
    assert truths[:4] == [
        humaneval,
        {"asserts": ["assert f(1) == 1"], "setup": "import math"},
        pairs,
        {"inputs": [[1], [2]], "outputs": [1, 2], "entry_point": "same"},
    ]
    assert [row["extra_info"]["gt_traj"] for row in written] == [
        "    return x\n",
        "def f",
        "print(input())",
        "",
        "",
        "",
    ]
    assert "assert f(1) == 1" in written[1]["prompt"][0]["content"]
    reasons = {"no tests": 8, "cannot be read": 2, "not JSON": 1, "neither asserts": 1, "(looked for prompt)": 1}
    check_counts(said, 6, {**reasons, "not valid Unicode": 2})


def test_code_on_humaneval_in_a_gzip_file(tmp_path):
    source = tmp_path / "HumanEval.jsonl.gz"
    source.write_bytes(gzip.compress((DATA / "humaneval.jsonl").read_bytes()))
    rows, said = made("prepare_code", tmp_path, source, "--splits", "test", split="test")
    assert "(data_source HumanEval): 12 rows kept" in said
    assert len(load_prompts(str(tmp_path / "out" / "test.parquet"), "prompt")) == 12
    assert json.loads(rows[0]["metadata"])["task_id"] == "HumanEval/0"
    source.write_bytes(b"no gzip")
    (tmp_path / "out" / "test.parquet").unlink()
    (tmp_path / "out").rmdir()
    assert "not a readable gzip file" in refused("prepare_code", tmp_path, source)


def test_the_page_lists_all_scripts():
    page = ROOT / "docs" / "data.md"
    if not page.exists():
        pytest.skip("an installed package has no docs folder")
    scripts = {path.stem for path in (ROOT / "examples" / "data_preprocess").glob("prepare*.py")}
    assert set(re.findall(r"^\| `(prepare\w*)", page.read_text(encoding="utf-8"), re.MULTILINE)) == scripts
