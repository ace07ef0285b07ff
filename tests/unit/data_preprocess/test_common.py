"""Parts that the scripts share: columns of a row, which rows are kept, sources, and the rows that are written."""

import math
import sys
from types import SimpleNamespace

import pytest

from examples.data_preprocess.columns import Columns, Dropped, find_problem, ground_truth_of
from examples.data_preprocess.common import (
    convert,
    data_source_of,
    read_splits,
    source_name,
)
from tests.builders import write_rows


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        (r"so \boxed{1}, no: \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{3} #### 4", "3"),
        ("2+1=3\nA: 3", "3"),
        (r"$\boxed 7$ apples", "7"),
        ("So it is.\nFinal answer: 1,200 apples \n", "1,200 apples"),
        ("Monday", "Monday"),
        ("A: 3 is not\nthe last line", "A: 3 is not\nthe last line"),
    ],
)
def test_the_ground_truth_is_the_last_box_or_after_hashes_or_all(answer, truth):
    assert ground_truth_of(answer) == truth


CHAT = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
SEVERAL = {"prompt": "p", "problem": "q", "question": " ", "solution": r"\boxed{1}", "target": 2, "level": 5}
REST = {"prompt": "p", "question": " ", "target": 2, "level": 5}


@pytest.mark.parametrize(
    ("row", "found"),  # question, ground truth, solution, metadata
    [
        (SEVERAL, ("q", "1", r"\boxed{1}", REST)),  # the first column with text
        ({"problem": "q", "answer": "7", "solution": r"way to \boxed{7}"}, ("q", "7", r"way to \boxed{7}", {})),
        ({"prompt": CHAT, "answer": 145.0}, ("q", "145", "145", {})),
    ],
)
def test_columns_of_a_problem(row, found):
    problem = find_problem(row)
    assert (problem.question, problem.ground_truth, problem.solution, problem.metadata) == found


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, r"no question \(.*question, problem, prompt"),
        ({"question": "q"}, r"no answer \(.*answer, solution, ground_truth"),
        ({"question": "", "answer": "1"}, "empty .*column question"),
        ({"question": True, "answer": "1"}, "not text .*column question"),
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


@pytest.mark.parametrize(
    ("source", "name", "data_source"),
    [
        ("openai/gsm8k", "gsm8k", "openai/gsm8k"),
        ("DigitalLearningGmbH/MATH-lighteval", "MATH-lighteval", "DigitalLearningGmbH/MATH-lighteval"),
        ("gsm8k_train.jsonl", "gsm8k", "gsm8k"),
    ],
)
def test_short_name_and_the_name_that_a_grader_takes(tmp_path, monkeypatch, source, name, data_source):
    monkeypatch.chdir(tmp_path)
    if source.endswith(".jsonl"):
        write_rows(tmp_path / source, [{}])
    assert (source_name(source), data_source_of(source, "math")) == (name, data_source)


def test_splits_of_a_file_or_folder_follow_from_names(tmp_path):
    rows = [{"question": str(number)} for number in range(4)]
    files = {"data/train-00000-of-00002.jsonl": rows[:1], "data/train-00001-of-00002.jsonl": rows[1:2]}
    for name, part in {**files, "x_test.jsonl": rows[2:3], "contest.jsonl": rows[3:]}.items():
        write_rows(tmp_path / "folder" / name, part)
    assert read_splits(str(tmp_path / "folder"), ["train", "test"], None) == {"train": rows[:2], "test": rows[2:3]}
    for name, split in (("a_test.jsonl", "test"), ("a.jsonl", "train")):
        assert read_splits(write_rows(tmp_path / name, rows), ["train", "test"], None) == {split: rows}


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("./none", "no such file or folder"),
        ("folder", r"train, test.* data\.jsonl"),  # a folder without the splits lists its files
        ("openai/gsm8k", "openai/gsm8k.*Error"),
    ],
)
def test_source_that_cannot_be_read_is_an_error(monkeypatch, tmp_path, source, reason):
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace())
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "folder" / "data.jsonl", [{"question": "q"}])
    with pytest.raises(ValueError, match=reason):
        read_splits(source, ["train", "test"], None)


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
