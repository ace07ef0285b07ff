"""prepare_validation, _custom, _single_question, _sft, _preference and _code."""

import importlib
import io
import json
import re
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

from alphaapollo.data.prompts import load_prompts, read_chat

ROOT = Path(__file__).resolve().parents[3]
SHARED = ROOT / "../shared/data"

pytestmark = pytest.mark.timeout(120)
real_data = pytest.mark.skipif(not SHARED.exists(), reason="the shared data files are not at hand")

GOOD = {"question": "1+1?", "answer": "1+1 = <<1+1=2>>2\n#### 2"}
DIRTY = [
    {"question": "no answer"},
    {},
    {"question": 5, "answer": None},
    {"question": {"a": 1}, "answer": "1"},
    {"question": "", "answer": "1"},
    {"question": "half \ud83d", "answer": "1"},
    {"question": "数学 🙂?", "answer": 3},
    {"question": "x" * 2_000_000, "answer": "y" * 2_000_000},
]


def run(name, *args):
    """Output and exit code of a script run in this process (test_scripts.py starts them as commands)."""
    module = importlib.import_module(f"examples.data_preprocess.{name}")
    out, err, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(ROOT)
        patch.setattr(sys, "argv", [name, *map(str, args)])
        try:
            module.main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1 if end.code else 0
            if isinstance(end.code, str):
                err.write(end.code)
    return SimpleNamespace(returncode=code, stdout=out.getvalue(), stderr=err.getvalue())


def write(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def made(name, tmp_path, *args, split="train"):
    """Rows that a script writes, and its output."""
    done = run(name, *args, "--local_dir", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "A sample row" in done.stdout
    return pq.read_table(tmp_path / "out" / f"{split}.parquet").to_pylist(), done.stdout


def refused(name, tmp_path, *args):
    done = run(name, *args, "--local_dir", tmp_path / "out")
    assert done.returncode == 1 and done.stderr.startswith("error: ") and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
    return done.stderr


def test_validation_repeats_each_source_and_says_what_came_from_where(tmp_path):
    one = write(tmp_path / "aime_test.jsonl", [GOOD, {"problem": "2+2?", "solution": r"\boxed{4}"}])
    two = write(tmp_path / "other_test.jsonl", [*DIRTY, GOOD])
    rows, said = made("prepare_validation", tmp_path, "--data_sources", one, two, "--repeat", 2, 3, split="test")
    assert [(row["data_source"], row["extra_info"]["index"]) for row in rows] == (
        [("aime", 0)] * 2 + [("aime", 1)] * 2 + [("math/other", index) for index in (6, 7, 8) for _ in range(3)]
    )
    assert "(aime, math/other): 13 rows kept, 6 dropped\n  2 dropped: no answer" in said
    info = json.loads((tmp_path / "out" / "test_info.json").read_text())
    assert (info["split"], info["rows"]) == ("test", 13)
    assert info["sources"][0] == {
        "data_source": "aime",
        "source": str(one),
        "problems": 2,
        "repeat": 2,
        "rows": 4,
        "dropped": {},
    }
    assert sum(info["sources"][1]["dropped"].values()) == 6
    assert len(load_prompts(str(tmp_path / "out" / "test.parquet"), "prompt")) == 13


@pytest.mark.parametrize(
    ("repeat", "what"), [([1, 2, 3], "one for each of 2 sources"), ([0], "give one number"), ([1], "the same name")]
)
def test_validation_refuses(tmp_path, repeat, what):
    one = write(tmp_path / "a_test.jsonl", [GOOD])
    two = write(tmp_path / ("a_test.json" if what == "the same name" else "b_test.jsonl"), [GOOD])
    assert what in refused("prepare_validation", tmp_path, "--data_sources", one, two, "--repeat", *repeat)


@real_data
def test_validation_on_real_sources(tmp_path):
    sources = [SHARED / "gsm8k_test.jsonl", SHARED / "svamp_test.jsonl"]
    rows, said = made("prepare_validation", tmp_path, "--data_sources", *sources, "--repeat", 1, 2, split="test")
    assert len(rows) == 1319 + 2 * 1000 and "0 dropped" in said
    svamp = rows[1319]
    assert svamp["data_source"] == "svamp" and svamp["reward_model"]["ground_truth"] == "145"
    assert svamp["extra_info"]["question"].startswith("There are 87 oranges and 290 bananas in Philip's collection. If")
    assert svamp["extra_info"]["question"].endswith("into 93 groups. How big is each group of bananas?")


def test_custom_takes_the_chosen_rows(tmp_path):
    source = write(tmp_path / "mine.jsonl", [{**GOOD, "level": index} for index in range(6)])
    rows, _ = made("prepare_custom", tmp_path, "--data_source", source, "--sample_indices", "4,0-1")
    assert [row["extra_info"]["index"] for row in rows] == [4, 0, 1]
    assert [json.loads(row["metadata"])["level"] for row in rows] == [4, 0, 1]


@pytest.mark.parametrize(
    ("indices", "what"),
    [
        ("0,9", "the rows are 0 to 5"),
        ("0-99999999999", "the rows are 0"),
        ("a", "not an index or range"),
        ("3-1", "not an index or range"),
        ("1,", "not an index or range"),
    ],
)
def test_custom_refuses_other_rows(tmp_path, indices, what):
    source = write(tmp_path / "mine.jsonl", [GOOD] * 6)
    assert what in refused("prepare_custom", tmp_path, "--data_source", source, "--sample_indices", indices)


def test_custom_counts_chosen_rows_that_cannot_be_used(tmp_path):
    source = write(tmp_path / "mine.jsonl", [GOOD, *DIRTY])
    rows, said = made("prepare_custom", tmp_path, "--data_source", source, "--sample_indices", "0-5")
    assert len(rows) == 1 and "1 rows kept, 5 dropped" in said


def test_custom_takes_one_split(tmp_path):
    for split in ("train", "test"):
        write(tmp_path / f"{split}.jsonl", [GOOD])
    assert "choose one with --splits" in refused("prepare_custom", tmp_path, "--data_source", tmp_path)


def test_single_question(tmp_path):
    arguments = ["--question", "2+2?", "--ground_truth", r"so \boxed{4}"]
    (row,), _ = made("prepare_single_question", tmp_path, *arguments, "--splits", "train", "val", split="val")
    assert (row["data_source"], row["reward_model"]["ground_truth"]) == ("math", "4")
    assert row["prompt"][0]["content"].startswith("2+2?\n\nReason step by step")


def test_single_question_refuses(tmp_path):
    base = ["prepare_single_question", tmp_path, "--question"]
    assert "no reward function" in refused(*base, "q", "--ground_truth", "4", "--data_source", "poems")
    assert "the question is empty" in refused(*base, " ", "--ground_truth", "4")


def test_sft_plain_and_with_tools(tmp_path):
    source = write(tmp_path / "gsm8k_train.jsonl", [GOOD, *DIRTY])
    rows, said = made("prepare_sft", tmp_path, "--data_source", source)
    assert [message["role"] for message in rows[0]["messages"]] == ["user", "assistant"]
    assert rows[0]["messages"][1]["content"] == "1+1 = 2\n\\boxed{2}"
    assert "(3 assistant turns): 3 rows kept, 6 dropped" in said
    rows, said = made("prepare_sft", tmp_path, "--data_source", source, "--protocol", "tools")
    assert [message["role"] for message in rows[0]["messages"]] == ["user", "assistant", "user", "assistant"]
    assert rows[0]["extra_info"] == {"split": "train", "index": 0, "ground_truth": "2"}
    assert "(4 assistant turns): 3 rows kept" in said
    assert all(read_chat(row["messages"], "messages") for row in rows)


def test_sft_takes_chats_as_they_are(tmp_path):
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    rows = [
        {"messages": chat},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
        {"messages": chat[:1]},
        {"messages": [chat[0], {"role": "assistant", "content": " "}]},
        {"messages": "hi"},
        {"messages": [1]},
        {"messages": [{"role": "user"}]},
        {"messages": [chat[0], {"role": "assistant", "content": "\ud83d"}]},
    ]
    written, said = made("prepare_sft", tmp_path, "--data_source", write(tmp_path / "x.jsonl", rows))
    assert [row["messages"] for row in written] == [chat, chat]
    assert "2 rows kept, 6 dropped" in said
    for reason in (
        "2 dropped: no text of the assistant",
        "not a list of messages",
        "2 dropped: a message is not {role, content} with text",
        "not valid Unicode",
    ):
        assert reason in said


MODELS = {
    "question": "A robe takes 2 bolts of blue fiber and half that much white. How many in all?",
    "ground_truth": "It takes 2/2=<<2/2=1>>1 bolt of white fiber\nSo it is 2+1=<<2+1=3>>3 bolts of fabric in all\nA: 3",
    "small_model": {"is_correct": True, "solution": "White is 1, so 2+1=<<2+1=3>>3\nA: 3"},
    "large_model": {"is_correct": False, "solution": "It takes 2*100=<<2*100=200>>200 meters\nA: 200"},
}
UNSOLVED = {**MODELS, "small_model": {"is_correct": False, "solution": "It is 5\nA: 5"}}


def test_sft_takes_the_solutions_that_are_labelled_as_right(tmp_path):
    source = write(tmp_path / "gsm8k_model_solutions.jsonl", [MODELS, UNSOLVED])
    rows, said = made("prepare_sft", tmp_path, "--data_source", source)
    assert [row["messages"][1]["content"] for row in rows] == ["White is 1, so 2+1=3\n\\boxed{3}"]
    assert rows[0]["extra_info"]["ground_truth"] == "3"
    assert "1 rows kept, 1 dropped\n  1 dropped: no right solution" in said


def test_sft_of_one_column_and_a_filter(tmp_path):
    right = {**UNSOLVED, "large_model": {"is_correct": 1, "solution": "1+2=<<1+2=3>>3\nA: 3"}}
    source = write(tmp_path / "x.jsonl", [MODELS, UNSOLVED, right])
    chosen = ["--answer_key", "large_model.solution", "--where", "large_model.is_correct"]
    rows, said = made("prepare_sft", tmp_path, "--data_source", source, *chosen, "--protocol", "tools")
    assert [row["messages"][-1]["content"] for row in rows] == ["<think>\n3\n</think>\n<answer>\\boxed{3}</answer>"]
    assert "1 rows kept, 2 dropped\n  2 dropped: not --where large_model.is_correct" in said
    rows, _ = made("prepare_sft", tmp_path, "--data_source", source, "--answer_key", "ground_truth")
    assert len(rows) == 3 and rows[0]["messages"][1]["content"].endswith("in all\n\\boxed{3}")


def test_a_column_that_is_not_there_is_one_line(tmp_path):
    source = write(tmp_path / "x.jsonl", [MODELS])
    for option in ("--question_key", "--answer_key", "--where"):
        said = refused("prepare_sft", tmp_path, "--data_source", source, option, "solution")
        assert f"{option} solution: no row of train has it. Use one of question, ground_truth, small_model, " in said
        assert "small_model.is_correct, small_model.solution" in said


def test_rl_rows_of_solutions_have_their_final_answers(tmp_path):
    prose = {"question": "Why?", "answer": "Because the sum of all the parts is\nthe whole, and so on"}
    source = write(tmp_path / "x.jsonl", [MODELS, prose, {"question": "q", "answer": "no", "mine": r"so \boxed{7}"}])
    rows, said = made("prepare_informal_math", tmp_path, "--data_source", source)
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["3", "no"]
    assert "1 dropped: the answer is a text without" in said and "with --answer_key" in said
    rows, _ = made("prepare_informal_math", tmp_path, "--data_source", source, "--answer_key", "mine")
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["7"]


@real_data
def test_sft_on_the_labelled_solutions(tmp_path):
    rows, said = made("prepare_sft", tmp_path, "--data_source", SHARED / "gsm8k_model_solutions.jsonl")
    assert "no right solution" in said
    assert all(len(row["extra_info"]["ground_truth"]) < 12 for row in rows)
    assert all(row["messages"][1]["content"].endswith("}") for row in rows)
    assert max(len(row["messages"][1]["content"].rpartition("boxed")[2]) for row in rows) < 16


@real_data
def test_sft_on_gsm8k(tmp_path):
    arguments = ["--data_source", SHARED / "gsm8k_train.jsonl", "--protocol", "tools"]
    rows, said = made("prepare_sft", tmp_path, *arguments)
    assert "(31189 assistant turns): 7473 rows kept, 0 dropped" in said
    text = "".join(message["content"] for row in rows for message in row["messages"])
    assert "<<" not in text and "####" not in text


def test_preference_pairs(tmp_path):
    def solution(text, right):
        return {"solution": text, "is_correct": right}

    chat = [{"role": "user", "content": "hi"}]
    good, bad = {"role": "assistant", "content": "hello"}, {"role": "assistant", "content": "go"}
    rows = [
        {"question": "q", "answer": "2", "a": solution("1+1=<<1+1=2>>2", True), "b": solution("3", False)},
        {"question": "q", "solutions": [solution("a", 1), solution("b", True), solution("c", 0), solution("d", "no")]},
        {"prompt": "p", "chosen": "x", "rejected": "y"},
        {"chosen": [*chat, good], "rejected": [*chat, bad]},
        {"question": "q", "a": solution("2", True), "b": solution("2", False)},
        {"prompt": "p", "chosen": "x", "rejected": "x"},
        {"prompt": "p", "chosen": "x"},
        {"chosen": "x", "rejected": "y"},
        {"chosen": [*chat, good], "rejected": [{"role": "user", "content": "ho"}, bad]},
        *DIRTY,
    ]
    written, said = made("prepare_preference", tmp_path, "--data_source", write(tmp_path / "x.jsonl", rows))
    short = [
        (row["extra_info"]["index"], row["chosen"][0]["content"], row["rejected"][0]["content"]) for row in written
    ]
    assert short == [(0, "1+1=2", "3"), (1, "a", "c"), (1, "b", "c"), (2, "x", "y"), (3, "hello", "go")]
    assert written[0]["prompt"] == [{"role": "user", "content": "q"}] and written[4]["prompt"] == chat
    assert written[0]["extra_info"]["ground_truth"] == "2"
    assert "(5 pairs): 4 rows kept, 13 dropped" in said
    assert "8 dropped: neither chosen and rejected, nor labelled solutions" in said
    for reason in (
        "no pair of a right and a wrong",
        "are the same",
        "no rejected answer",
        "answer different questions",
    ):
        assert reason in said


@real_data
def test_preference_on_the_labelled_solutions(tmp_path):
    rows, said = made("prepare_preference", tmp_path, "--data_source", SHARED / "gsm8k_model_solutions.jsonl")
    assert "731 rows kept, 588 dropped\n  588 dropped: no pair of a right and a wrong solution" in said
    assert len(rows) == 2426 and all(row["chosen"] != row["rejected"] for row in rows)


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
    written, said = made("prepare_code", tmp_path, "--data_source", write(tmp_path / "x.jsonl", rows))
    assert [row["extra_info"]["index"] for row in written] == [0, 1, 2, 3]
    assert {row["data_source"] for row in written} == {"code/x"}
    truths = [json.loads(row["reward_model"]["ground_truth"]) for row in written]
    assert truths == [
        humaneval,
        {"asserts": ["assert f(1) == 1"], "setup": "import math"},
        pairs,
        {"inputs": [[1], [2]], "outputs": [1, 2], "entry_point": "same"},
    ]
    assert [row["extra_info"]["gt_traj"] for row in written] == ["    return x\n", "def f", "print(input())", ""]
    assert "assert f(1) == 1" in written[1]["prompt"][0]["content"]
    assert "4 rows kept, 17 dropped\n  9 dropped: no tests" in said
    for reason in (
        "the tests are not JSON",
        "neither asserts nor inputs",
        "4 dropped: the tests cannot be read",
        "not valid Unicode",
    ):
        assert reason in said


@real_data
def test_code_on_humaneval(tmp_path):
    arguments = ["--data_source", SHARED / "HumanEval.jsonl.gz", "--splits", "test"]
    rows, said = made("prepare_code", tmp_path, *arguments, split="test")
    assert "(data_source HumanEval): 164 rows kept, 0 dropped" in said
    assert len(load_prompts(str(tmp_path / "out" / "test.parquet"), "prompt")) == 164
    assert json.loads(rows[0]["metadata"])["task_id"] == "HumanEval/0"


def test_the_page_lists_all_scripts():
    page = ROOT / "docs" / "data.md"
    if not page.exists():
        pytest.skip("an installed package has no docs folder")
    scripts = {path.stem for path in (ROOT / "examples" / "data_preprocess").glob("prepare*.py")}
    assert set(re.findall(r"^\| `(prepare\w*)", page.read_text(encoding="utf-8"), re.MULTILINE)) == scripts


def test_a_broken_gzip_file_is_one_line(tmp_path):
    (tmp_path / "x.jsonl.gz").write_bytes(b"no gzip")
    assert "not a readable gzip file" in refused("prepare_code", tmp_path, "--data_source", tmp_path / "x.jsonl.gz")
