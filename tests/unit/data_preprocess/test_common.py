import json
import math
import sys
from types import SimpleNamespace

import pytest

from alphaapollo.data.prompts import load_prompts
from examples.data_preprocess.columns import Columns, Dropped, find_problem, ground_truth_of
from examples.data_preprocess.common import (
    convert,
    data_source_of,
    read_splits,
    rl_row,
    show_sample,
    source_name,
    write_parquet,
)
from tests.builders import write_rows
from tests.unit.data_preprocess.scripts import check_counts


@pytest.mark.parametrize(
    ("truth", "answers"),
    [
        (r"\frac{1}{2}", [r"so \boxed{1}, no: \boxed{\frac{1}{2}}."]),
        ("72", ["48/2 = <<48/2=24>>24\n#### 72"]),
        ("3", [r"\boxed{3} #### 4", "2+1=3\nA: 3"]),
        ("42", [" 42 "]),
        ("7", [r"$\boxed 7$ apples"]),
        ("4", ["Answer = 4"]),
        ("1,200 apples", ["So it is.\nFinal answer: 1,200 apples \n"]),
        ("Monday", ["Monday"]),
        ("A: 3 is not\nthe last line", ["A: 3 is not\nthe last line"]),
    ],
)
def test_the_ground_truth_is_the_last_box_or_after_hashes_or_all(truth, answers):
    assert {ground_truth_of(answer) for answer in answers} == {truth}


def test_first_column_with_text_is_used():
    row = {"prompt": "p", "problem": "q", "question": " ", "solution": r"\boxed{1}", "target": 2, "level": 5}
    problem = find_problem(row)
    assert (problem.question, problem.ground_truth, problem.solution) == ("q", "1", r"\boxed{1}")
    assert problem.metadata == {"prompt": "p", "question": " ", "target": 2, "level": 5}


def test_an_answer_column_beside_a_solution():
    problem = find_problem({"problem": "q", "answer": "7", "solution": r"long way to \boxed{7}"})
    assert (problem.ground_truth, problem.solution) == ("7", r"long way to \boxed{7}")


def test_numbers_and_chats_are_read_as_text():
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    problem = find_problem({"prompt": chat, "answer": 145.0})
    assert (problem.question, problem.ground_truth) == ("q", "145")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, r"no question \(.*question, problem, prompt"),
        ({"question": None, "answer": "1"}, r"no question \("),
        ({"question": "q"}, r"no answer \(.*answer, solution, ground_truth"),
        ({"question": "", "answer": "1"}, "empty .*column question"),
        ({"question": " \n", "answer": "1"}, "empty .*column question"),
        ({"question": ["a", "b"], "answer": "1"}, "not text .*column question"),
        ({"question": True, "answer": "1"}, "not text .*column question"),
        ({"question": "q", "answer": {"a": 1}}, "not text .*column answer"),
        ({"question": "q", "answer": math.nan}, "not text .*column answer"),
        ({"question": "q", "answer": r"\boxed{}"}, "ground truth is empty"),
        ({"question": "q", "answer": "word " * 41}, "column answer.*--answer_key"),
        ({"question": "q \ud83d", "answer": "1"}, "not valid Unicode .*column question"),
        ({"Question": "q", "Body": "\ud83d", "Answer": 1}, "not valid Unicode .*column Body"),
    ],
)
def test_unusable_rows_are_dropped_with_a_reason(row, reason):
    with pytest.raises(Dropped, match=reason):
        find_problem(row)


@pytest.mark.parametrize(
    ("where", "kept"),
    [
        (["right"], [0, 2, 3]),
        (["right=true"], [0, 3]),
        (["level=3"], [0, 1]),
        (["level=3", "right"], [0]),
        (["by.model=B"], [2]),
        ([], [0, 1, 2, 3]),
    ],
)
def test_rows_that_the_user_wants(where, kept):
    rows = [
        {"right": True, "level": 3, "by": {"model": "a"}},
        {"right": False, "level": 3.0},
        {"right": 1, "level": "2", "by": {"model": "b"}},
        {"right": "true", "by": None},
    ]
    made, count = convert(rows, lambda row, index: {"index": index}, "rows", Columns(where=tuple(where)))
    assert [row["index"] for row in made] == kept and count.dropped.total() == 4 - len(kept)


def test_kept_and_dropped_rows_are_counted_with_reasons():
    rows = [{"question": "q", "answer": "1"}, {}, {"question": "", "answer": "1"}, {}]
    made, count = convert(rows, lambda row, index: {"index": index, "problem": find_problem(row)}, "rows")
    assert [row["index"] for row in made] == [0]
    check_counts(str(count), 1, {"no question": 2, "is empty": 1})


def test_lines_that_are_no_rows_are_counted_too(tmp_path):
    lines = [b'{"question": "q", "answer": "1"}', b"null", b'{"question": "cut', b"[1]"]
    lines += [b'{"question": "\xe9", "answer": 1}']
    lines += [b"[" * 100_000, b'{"answer": ' + b"9" * 5000 + b"}", b"", b'{"question": "p", "answer": "2"}']
    (tmp_path / "dirty.jsonl").write_bytes(b"\n".join(lines))
    rows = read_splits(str(tmp_path / "dirty.jsonl"), ["train"], None)["train"]
    made, count = convert(rows, lambda row, index: {"question": find_problem(row).question}, "rows")
    assert made == [{"question": "q"}, {"question": "p"}]
    check_counts(str(count), 2, {"not valid JSON": 3, "not an object": 2, "not valid Unicode": 1})


def test_long_texts_of_the_sample_row_are_cut(capsys):
    show_sample([{"prompt": [{"content": "x" * 5000}], "seed": 3}])
    assert "x" * 1000 + "... (5,000 characters)" in capsys.readouterr().out


def test_written_row_is_read_as_the_same_prompt(tmp_path):
    problem = find_problem({"question": "¿2+2? 🙂", "answer": "#### 4", "level": 3})
    write_parquet([rl_row(problem, "ask", "gsm8k", "math", "train", 7)], tmp_path / "new" / "train.parquet")
    (prompt,) = load_prompts(str(tmp_path / "new" / "train.parquet"), "prompt")
    assert prompt.content == [{"role": "user", "content": "ask"}]
    assert (prompt.data_source, prompt.ground_truth) == ("gsm8k", "4")
    facts = {"question": "¿2+2? 🙂", "ground_truth": "4", "gt_traj": "#### 4", "data_source": "gsm8k"}
    assert prompt.extra_info == {"split": "train", "index": 7, **facts, "metadata": {"level": 3}}
    assert prompt.env_kwargs == facts
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["train.parquet"]


def test_a_huge_row_survives(tmp_path):
    problem = find_problem({"question": "x" * 5_000_000, "answer": "1"})
    write_parquet([rl_row(problem, problem.question, "math", "math", "train", 0)], tmp_path / "train.parquet")
    assert len(load_prompts(str(tmp_path / "train.parquet"), "prompt")[0].content[0]["content"]) == 5_000_000


def test_hub_ids_have_short_names():
    sources = ("openai/gsm8k", "DigitalLearningGmbH/MATH-lighteval", "x/HuggingFaceH4/aime.v2")
    assert [source_name(source) for source in sources] == ["gsm8k", "MATH-lighteval", "aime.v2"]


def test_data_sources_are_names_that_a_grader_takes(tmp_path):
    for name in ("gsm8k_train.jsonl", "mine.jsonl"):
        write_rows(tmp_path / name, [{}])
    assert data_source_of(str(tmp_path / "gsm8k_train.jsonl"), "math") == "gsm8k"
    assert data_source_of(str(tmp_path / "mine.jsonl"), "math") == "math/mine"
    assert data_source_of("openai/gsm8k", "math") == "openai/gsm8k"
    assert data_source_of("someone/problems", "math") == "math/someone/problems"


@pytest.mark.parametrize(("name", "split"), [("a_test.jsonl", "test"), ("a.jsonl", "train")])
def test_split_of_a_file_follows_from_its_name(tmp_path, name, split):
    row = {"question": "q"}
    assert read_splits(write_rows(tmp_path / name, [row]), ["train", "test"], None) == {split: [row]}


def test_a_folder_is_searched_for_its_splits(tmp_path):
    rows = [{"question": str(i)} for i in range(4)]
    write_rows(tmp_path / "data" / "train-00000-of-00002.jsonl", rows[:1])
    write_rows(tmp_path / "data" / "train-00001-of-00002.jsonl", rows[1:2])
    (tmp_path / "x_test.json").write_text(json.dumps(rows[2:3]))
    write_rows(tmp_path / "contest.jsonl", rows[3:])
    assert read_splits(str(tmp_path), ["train", "test"], None) == {"train": rows[:2], "test": rows[2:3]}


def test_a_folder_without_the_splits_lists_its_files(tmp_path):
    write_rows(tmp_path / "data.jsonl", [{"question": "q"}])
    with pytest.raises(ValueError, match=r"train, test.* data\.jsonl"):
        read_splits(str(tmp_path), ["train", "test"], None)


@pytest.mark.parametrize("source", ["./none", "/none/at/all", "none.parquet", "a/b/c"])
def test_missing_path_is_reported(source):
    with pytest.raises(ValueError, match="no such file or folder"):
        read_splits(source, ["train"], None)


def test_a_hub_id_is_read_with_its_configuration(monkeypatch):
    asked = []

    def load_dataset(*args):
        asked.append(args)
        return {"train": SimpleNamespace(to_list=lambda: [{"question": "q"}]), "other": None}

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert read_splits("openai/gsm8k", ["train", "test"], "main") == {"train": [{"question": "q"}]}
    assert asked == [("openai/gsm8k", "main")]
    with pytest.raises(ValueError, match="dev; it has train, other"):
        read_splits("openai/gsm8k", ["dev"], "main")


def raise_connection_error(*args):
    raise ConnectionError("no network")


@pytest.mark.parametrize(
    ("datasets", "reason"),
    [
        (None, "pip install datasets"),
        (SimpleNamespace(load_dataset=raise_connection_error), "ConnectionError: no network"),
    ],
)
def test_a_hub_that_cannot_be_used_is_an_error(monkeypatch, datasets, reason):
    monkeypatch.setitem(sys.modules, "datasets", datasets)
    with pytest.raises(ValueError, match=reason):
        read_splits("openai/gsm8k", ["train"], None)
