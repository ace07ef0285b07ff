import json
from datetime import date
from decimal import Decimal

import pandas
import pytest

from alphaapollo.data.prompts import load_prompts
from alphaapollo.types import Prompt
from tests.builders import write_rows as write

CHAT = [{"role": "user", "content": "2+2=?"}]
FULL = {
    "data_source": "openai/gsm8k",
    "prompt": CHAT,
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"split": "train", "index": 0, "question": "2+2=?"},
    "metadata": '{"level": 3}',
    "env_kwargs": {"question": "2+2=?", "ground_truth": "4"},
}


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_the_full_schema_in_plain_python(tmp_path, suffix):
    (prompt,) = load_prompts(write(tmp_path / f"data{suffix}", [FULL]), "prompt")
    extra_info = {"split": "train", "index": 0, "question": "2+2=?", "metadata": {"level": 3}}
    assert prompt == Prompt(0, "openai/gsm8k", CHAT, "4", extra_info, {"question": "2+2=?", "ground_truth": "4"})
    assert type(prompt.content) is list and type(prompt.content[0]) is dict


def test_only_a_prompt_column_is_needed(tmp_path):
    path = write(tmp_path / "data.jsonl", [{"question": "1+1=?"}])
    assert load_prompts(path, "question") == [Prompt(id=0, data_source="", content="1+1=?")]


def test_ids_continue_over_files(tmp_path):
    files = [write(tmp_path / name, [{"prompt": "a"}, {"prompt": "b"}]) for name in ("x.jsonl", "y.parquet")]
    assert [prompt.id for prompt in load_prompts(files, "prompt")] == [0, 1, 2, 3]


def test_ground_truth_is_looked_for_in_extra_info_and_env_kwargs(tmp_path):
    rows = [{"prompt": "p", "extra_info": {"ground_truth": "1"}}, {"prompt": "p", "env_kwargs": {"ground_truth": "2"}}]
    assert [p.ground_truth for p in load_prompts(write(tmp_path / "d.jsonl", rows), "prompt")] == ["1", "2"]


def test_other_columns_are_in_extra_info(tmp_path):
    row = {"prompt": "p", "level": 3, "split": "a", "extra_info": {"split": "b"}, "ability": "x"}
    (prompt,) = load_prompts(write(tmp_path / "d.jsonl", [row]), "prompt")
    assert prompt.extra_info == {"level": 3, "split": "b"}


def test_unicode_survives(tmp_path):
    path = write(tmp_path / "data.parquet", [{"prompt": "¿Cuánto? 数学 🙂"}])
    assert load_prompts(path, "prompt")[0].content == "¿Cuánto? 数学 🙂"


def test_a_missing_column_lists_those_there_are(tmp_path):
    path = write(tmp_path / "data.parquet", [{"task": "q", "answer": "a"}])
    with pytest.raises(ValueError, match=r"'prompt'.*'task', 'answer'.*\.prompt_key"):
        load_prompts(path, "prompt")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [{"role": "user", "content": "2+2?"}], "ground_truth": 4},
        {"prompt": [{"role": "user", "content": "2+2?"}], "answer": "4"},
        {"question": "2+2?", "answer": "2 and 2 is\n#### 4"},
        {"problem": "2+2?", "ground_truth": "4", "answer": "2 and 2 is 4"},
    ],
)
def test_questions_with_answers_are_read_directly(tmp_path, row):
    notices: list[str] = []
    (prompt,) = load_prompts(write(tmp_path / "data.jsonl", [row]), "prompt", notices)
    assert (prompt.content, prompt.ground_truth_text) == ([{"role": "user", "content": "2+2?"}], "4")
    assert [notice.split(" is read as ")[1] for notice in notices] == (
        [] if "prompt" in row else [f"questions, each asked in a chat ({next(iter(row))})."]
    )


@pytest.mark.parametrize(
    ("first", "value", "what"),
    [
        ("text", "", "empty"),
        ("text", "  \n", "empty"),
        ("text", None, "missing"),
        ("text", 7, "7; .*text or a list"),
        ("text", [], "is a chat, .*a text"),
        ("text", CHAT, "is a chat, .*a text"),
        (CHAT, "text", "is a text, .*a chat"),
        (CHAT, [], "empty"),
        (CHAT, [{"role": "user", "content": " "}], "empty"),
        (CHAT, ["hello"], "'hello'; .*{role, content}"),
        (CHAT, [{"content": "x"}], "'content': 'x'.*; .*{role, content}"),
        (CHAT, [{"role": "user", "content": ["x"]}], "part of a message is 'x'. .*type"),
        (CHAT, [{"role": "user"}], "'role': 'user'.*content must be text"),
        (CHAT, [*CHAT, {"role": "assistant", "content": "4"}], "ends with an assistant"),
    ],
)
def test_invalid_prompt_is_reported_with_its_row(tmp_path, first, value, what):
    path = write(tmp_path / "data.jsonl", [{"prompt": first}, {"prompt": value}])
    with pytest.raises(ValueError, match=rf"data\.jsonl: 1 of 2 .*\n.*row 1: .*{what}"):
        load_prompts(path, "prompt")


def test_files_of_different_kinds_do_not_mix(tmp_path):
    files = [write(tmp_path / "a.jsonl", [{"prompt": "text"}]), write(tmp_path / "b.jsonl", [{"prompt": CHAT}])]
    with pytest.raises(ValueError, match=r"b\.jsonl.*\n  row 0: .*is a chat, "):
        load_prompts(files, "prompt")


def test_many_bad_rows_are_counted_and_the_first_shown(tmp_path):
    path = write(tmp_path / "data.jsonl", [{"prompt": ""}] * 9)
    with pytest.raises(ValueError, match="9 of 9 rows are invalid") as error:
        load_prompts(path, "prompt")
    assert "row 4" in str(error.value) and "row 5" not in str(error.value) and "and 4 more" in str(error.value)


@pytest.mark.parametrize(
    ("column", "value", "what"),
    [
        ("extra_info", "text", "'extra_info' is 'text'; .*struct"),
        ("reward_model", ["4"], "'reward_model' is .*; .*struct"),
        ("data_source", 3, "data_source is 3; .*text"),
    ],
)
def test_other_bad_columns_are_named(tmp_path, column, value, what):
    path = write(tmp_path / "data.jsonl", [{"prompt": "p", column: value}])
    with pytest.raises(ValueError, match=f"row 0: {what}"):
        load_prompts(path, "prompt")


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("none.jsonl", None, "no such file"),
        ("empty.jsonl", b"", "has no rows"),
        ("data.txt", b"x", r"'\.txt'.*parquet"),
        ("cut.parquet", b"PAR1 cut", "not a readable parquet file"),
        ("cut.jsonl", b'{"prompt": "a"}\n{"prompt": ', "line 2: not valid JSON"),
        ("list.jsonl", b'["a"]', r"line 1: not an object .* \(a list\)"),
        ("object.json", b'{"a": 1}', "no column"),
        ("latin.jsonl", b'{"prompt": "\xe9"}', r"line 1: .*invalid UTF-8"),
        ("half.jsonl", b'{"prompt": "\\ud83d\\ude42"}\n{"prompt": "a \\ud83d"}', r"line 2: .*surrogate.*\\ud83d"),
        ("half.json", b'[{"prompt": "p", "reward_model": {"ground_truth": "\\uDE42"}}]', "row 0: .*surrogate"),
    ],
)
def test_unreadable_files(tmp_path, name, content, what):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{name}.*{what}"):
        load_prompts(str(path), "prompt")


def test_a_folder_and_a_parquet_file_without_rows(tmp_path):
    pandas.DataFrame({"prompt": []}).to_parquet(tmp_path / "empty.parquet")
    for path in (tmp_path, tmp_path / "empty.parquet"):
        with pytest.raises(ValueError, match="has no rows"):
            load_prompts(str(path), "prompt")


def test_invalid_utf8_in_a_parquet_file_is_reported_with_the_file(tmp_path):
    import pyarrow
    import pyarrow.parquet

    texts = pyarrow.array([b"good", b"\xff"]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"prompt": texts}), tmp_path / "data.parquet")
    with pytest.raises(ValueError, match=r"data\.parquet: .*parquet file .*0xff"):
        load_prompts(str(tmp_path / "data.parquet"), "prompt")


TRUTHS = [
    "4",
    4,
    0.5,
    False,
    ["Paris", "paris"],
    {"target": ["a"], "n": 1},
    [{"expected": 1}, {"expected": 2}],
    [[1, 2], [3]],
    date(2024, 2, 1),
    Decimal("1.50"),
    [Decimal("1.50"), Decimal("2.25")],
    {"on": date(2024, 2, 1)},
    b"14",
    [b"14"],
]


@pytest.mark.parametrize("truth", TRUTHS, ids=repr)
@pytest.mark.parametrize("place", ["reward_model", "extra_info", "ground_truth", "answer", "solution"])
def test_a_ground_truth_has_the_value_of_the_file(tmp_path, truth, place):
    value = {"ground_truth": truth} if place in ("reward_model", "extra_info") else truth
    path = write(tmp_path / "data.parquet", [{"prompt": "p", place: value}])
    (prompt,) = load_prompts(path, "prompt")
    assert prompt.ground_truth == truth and type(prompt.ground_truth) is type(truth)
    assert isinstance(prompt.ground_truth_text, str)


@pytest.mark.parametrize(
    ("truth", "text"),
    [("4", "4"), (4, "4"), (False, "False"), (["a", "é"], '["a", "é"]'), ([b"a", Decimal("1.5")], '["a", "1.5"]')],
)
def test_a_ground_truth_as_text(truth, text):
    assert Prompt(0, "", "?", truth).ground_truth_text == text and Prompt(0, "", "?").ground_truth_text is None


@pytest.mark.parametrize("truth", [*TRUTHS[:8], None], ids=repr)
def test_a_ground_truth_that_a_run_writes_is_read_again(tmp_path, truth):
    row = {"prompt": "p", "ground_truth": Prompt(0, "", "p", truth).ground_truth_in_files}
    assert load_prompts(write(tmp_path / "results.jsonl", [row]), "prompt")[0].ground_truth == truth


def test_keys_that_parquet_adds_are_absent_at_every_level(tmp_path):
    tests = {"inputs": ["1"], "spec": {"a": 1}, "cases": [{"x": 1}, {"y": 2}], "list": [None, 1]}
    rows = [
        {
            "prompt": "p",
            "reward_model": {"ground_truth": tests},
            "extra_info": {"deep": {"tests": tests}},
            "own": tests,
        },
        {"prompt": "q", "reward_model": {"ground_truth": {"fn_name": "f", "spec": {"b": 2}}}, "extra_info": {"z": 1}},
    ]
    first, second = load_prompts(write(tmp_path / "data.parquet", rows), "prompt")
    assert first.ground_truth == tests and first.extra_info == {"deep": {"tests": tests}, "own": tests}
    assert second.ground_truth == {"fn_name": "f", "spec": {"b": 2}} and second.extra_info == {"z": 1}
    assert load_prompts(write(tmp_path / "d.jsonl", [{"prompt": "p", "answer": {"a": None}}]), "prompt")[
        0
    ].ground_truth == {"a": None}  # written by the user


CHATS_AS_TEXT = [
    json.dumps(CHAT),
    repr(CHAT),
    "[{'content': '2+2=?', 'role': 'user'}]",
    " " + json.dumps(CHAT, indent=1) + "\n",
]


@pytest.mark.parametrize("text", CHATS_AS_TEXT)
def test_a_chat_that_is_written_as_text(tmp_path, text):
    notices: list[str] = []
    (prompt,) = load_prompts(write(tmp_path / "data.parquet", [{"prompt": text}]), "prompt", notices)
    assert prompt.content == CHAT and len(notices) == 1


def test_dicts_of_a_numpy_array_as_text(tmp_path):
    text = "[{'role': 'system', 'content': 'short'}\n {'role': 'user', 'content': '2+2=?'}]"
    (prompt,) = load_prompts(write(tmp_path / "data.jsonl", [{"prompt": text}]), "prompt")
    assert [message["role"] for message in prompt.content] == ["system", "user"]


@pytest.mark.parametrize("text", ["[1, 2, 3] is sorted?", '["content"]', "[{'a': 1}]", '{"role": "user"}', "[]x"])
def test_a_text_that_is_no_chat(tmp_path, text):
    assert load_prompts(write(tmp_path / "data.jsonl", [{"prompt": text}]), "prompt")[0].content == text


def test_structs_that_are_written_as_text(tmp_path):
    row = {"prompt": "p", "reward_model": "{'ground_truth': 4, 'style': 'rule'}", "extra_info": '{"index": 1}'}
    (prompt,) = load_prompts(write(tmp_path / "data.jsonl", [row]), "prompt")
    assert (prompt.ground_truth, prompt.extra_info) == (4, {"index": 1})


def test_the_column_answer_of_gsm8k_stays_as_it_is(tmp_path):
    answer = "2 and 2 is\n#### 4"
    (prompt,) = load_prompts(write(tmp_path / "data.jsonl", [{"question": "2+2?", "answer": answer}]), "prompt")
    assert prompt.ground_truth == "4" and prompt.extra_info["answer"] == answer
