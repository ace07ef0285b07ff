import json
from datetime import date
from decimal import Decimal
from io import BytesIO

import pyarrow
import pyarrow.parquet
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


QUESTION = [{"role": "user", "content": "2+2?"}]
NUMPY_CHAT = "[{'role': 'system', 'content': 'short'}\n {'role': 'user', 'content': '2+2=?'}]"
NO_CHATS = ("[1, 2, 3] is sorted?", '["content"]', "[{'a': 1}]", '{"role": "user"}', "[]x", "¿Cuánto? 数学 🙂")


@pytest.fixture
def load(tmp_path):
    """Function that loads the prompts of rows."""

    def load(*rows, key="prompt", suffix=".jsonl", findings=None):
        return load_prompts(write(tmp_path / f"data{suffix}", rows), key, findings=findings)

    return load


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_the_full_schema_in_plain_python(load, suffix):
    (prompt,) = load(FULL, suffix=suffix)
    extra_info = {"split": "train", "index": 0, "question": "2+2=?", "metadata": {"level": 3}}
    assert prompt == Prompt(0, "openai/gsm8k", CHAT, "4", extra_info, {"question": "2+2=?", "ground_truth": "4"})
    assert type(prompt.content) is list and type(prompt.content[0]) is dict


def test_only_a_prompt_column_is_needed(load):
    assert load({"question": "1+1=?"}, key="question") == [Prompt(id=0, data_source="", content="1+1=?")]


STRUCTS_AS_TEXT = {"reward_model": "{'ground_truth': 4, 'style': 'rule'}", "extra_info": '{"index": 1}'}
OTHER_COLUMNS = {"level": 3, "split": "a", "extra_info": {"split": "b"}, "ability": "x"}
GSM8K = {"question": "2+2?", "answer": "2 and 2 is\n#### 4"}
PROBLEM = {"problem": "2+2?", "ground_truth": "4", "answer": "2 and 2 is 4"}
FIELDS = [
    ({"prompt": "p", "extra_info": {"ground_truth": "1"}}, {"ground_truth": "1"}),
    ({"prompt": "p", **OTHER_COLUMNS}, {"extra_info": {"level": 3, "split": "b"}}),
    ({"prompt": "p", **STRUCTS_AS_TEXT}, {"ground_truth": 4, "extra_info": {"index": 1}}),
    ({"prompt": QUESTION, "ground_truth": 4}, {"content": QUESTION, "ground_truth_text": "4"}),
    ({"prompt": QUESTION, "answer": "4"}, {"content": QUESTION, "ground_truth": "4"}),
    (GSM8K, {"content": QUESTION, "ground_truth": "4", "extra_info": GSM8K}),
    (PROBLEM, {"content": QUESTION, "ground_truth": "4"}),
    *(({"prompt": text}, {"content": CHAT}) for text in (json.dumps(CHAT), repr(CHAT))),
    ({"prompt": "[{'content': '2+2=?', 'role': 'user'}]"}, {"content": CHAT}),
    ({"prompt": NUMPY_CHAT}, {"content": [{"role": "system", "content": "short"}, *CHAT]}),
    *(({"prompt": text}, {"content": text}) for text in NO_CHATS),
]


@pytest.mark.parametrize(("row", "fields"), FIELDS)
def test_rows_are_read_directly(load, row, fields):
    for suffix in (".jsonl", ".parquet"):
        findings = []
        (prompt,) = load(row, suffix=suffix, findings=findings)
        assert {name: getattr(prompt, name) for name in fields} == fields
        if "prompt" not in row:
            (finding,) = findings
            assert next(iter(row)) in finding.content and "questions" in finding.effect
        else:
            is_converted = isinstance(row["prompt"], str) and isinstance(prompt.content, list)
            assert len(findings) == is_converted


def test_ids_continue_over_files(tmp_path):
    files = [write(tmp_path / name, [{"prompt": "a"}, {"prompt": "b"}]) for name in ("x.jsonl", "y.parquet")]
    assert [prompt.id for prompt in load_prompts(files, "prompt")] == [0, 1, 2, 3]


BAD_PROMPTS = [
    ("text", "", "empty"),
    ("text", None, "missing"),
    ("text", 7, "7; .*text or a list"),
    ("text", [], "empty"),
    (CHAT, [{"role": "user", "content": " "}], "empty"),
    (CHAT, [{"content": "x"}], "'content': 'x'.*; .*{role, content}"),
    (CHAT, [{"role": "user", "content": ["x"]}], "part of a message is 'x'. .*type"),
    (CHAT, [*CHAT, {"role": "assistant", "content": "4"}], "ends with an assistant"),
]


@pytest.mark.parametrize(("first", "value", "what"), BAD_PROMPTS)
def test_invalid_prompt_is_reported_with_its_row(load, first, value, what):
    with pytest.raises(ValueError, match=rf"data\.jsonl: 1 of 2 .*\n.*row 1: .*{what}"):
        load({"prompt": first}, {"prompt": value})


def test_chats_and_texts_do_not_mix(load, tmp_path):
    files = [write(tmp_path / "a.jsonl", [{"prompt": "text"}]), write(tmp_path / "b.jsonl", [{"prompt": CHAT}])]
    with pytest.raises(ValueError, match=r"1 of 2 prompts, the first in .*b\.jsonl, row 0: .*is a chat, .*a text"):
        load_prompts(files, "prompt")
    with pytest.raises(ValueError, match=r"2 of 3 prompts, .* row 1: .*is a text, .*a chat"):
        load({"prompt": CHAT}, {"prompt": "text"}, {"prompt": "more"})


def test_system_prompt(tmp_path):
    own = {"role": "system", "content": "Own."}
    rows = [{"prompt": "2+2?"}, {"prompt": CHAT}, {"prompt": [own, *CHAT]}, {"prompt": "2+2?", "system": "Own."}]
    path = write(tmp_path / "rows.jsonl", rows)
    chats = [prompt.content for prompt in load_prompts(path, "prompt", system_prompt="Be brief.")]
    assert [[message["role"] for message in chat] for chat in chats] == [["system", "user"]] * 4
    assert [chat[0]["content"] for chat in chats] == ["Be brief.", "Be brief.", "Own.", "Own."]
    assert chats[0][1] == {"role": "user", "content": "2+2?"}
    (alone,) = load_prompts(write(tmp_path / "text.jsonl", rows[3:]), "prompt")
    assert alone.content == chats[3]  # the column makes a chat of a text, as in SFT


def test_ground_truth_key(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"prompt": "a", "gold": "4", "answer": "5"}, {"prompt": "b", "answer": "6"}])
    assert [one.ground_truth for one in load_prompts(path, "prompt", ground_truth_key="gold")] == ["4", None]
    with pytest.raises(ValueError, match=r"no column data\.ground_truth_key=label\. Columns: prompt, gold, answer"):
        load_prompts(path, "prompt", ground_truth_key="label")


BAD_COLUMNS = [
    ({"prompt": "p", "extra_info": "text"}, "row 0: 'extra_info' is 'text'; .*struct"),
    ({"prompt": "p", "reward_model": ["4"]}, "row 0: 'reward_model' is .*; .*struct"),
    ({"prompt": "p", "data_source": 3}, "row 0: data_source is 3; .*text"),
    ({"task": "q", "answer": "a"}, r"'prompt'.*'task', 'answer'.*\.prompt_key"),  # lists the columns there are
]


@pytest.mark.parametrize(("row", "what"), BAD_COLUMNS)
def test_other_bad_columns_are_named(load, row, what):
    with pytest.raises(ValueError, match=what):
        load(row)


def to_parquet(columns) -> bytes:
    file = BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    return file.getvalue()


BAD_TEXTS = pyarrow.array([b"good", b"\xff"]).view(pyarrow.string())


UNREADABLE = [
    ("none.jsonl", None, "no such file"),
    ("empty.jsonl", b"", "has no rows"),
    ("cut.parquet", b"PAR1 cut", "not a readable parquet file"),
    ("cut.jsonl", b'{"prompt": "a"}\n{"prompt": ', "line 2: not valid JSON"),
    ("latin.jsonl", b'{"prompt": "\xe9"}', r"line 1: .*invalid UTF-8"),
    ("half.jsonl", b'{"prompt": "\\ud83d\\ude42"}\n{"prompt": "a \\ud83d"}', r"line 2: .*surrogate.*\\ud83d"),
    ("bytes.parquet", to_parquet({"prompt": BAD_TEXTS}), "parquet file .*0xff"),
]


@pytest.mark.parametrize(("name", "content", "what"), UNREADABLE)
def test_unreadable_files(tmp_path, name, content, what):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{name}.*{what}"):
        load_prompts(str(path), "prompt")


def test_a_folder_and_a_parquet_file_without_rows(tmp_path):
    file = tmp_path / "empty.parquet"
    file.write_bytes(to_parquet({"prompt": pyarrow.array([], pyarrow.string())}))
    for path in (tmp_path, file):
        with pytest.raises(ValueError, match="has no rows"):
            load_prompts(str(path), "prompt")


STRUCTS = [["Paris", "paris"], {"target": ["a"], "n": 1}, [{"expected": 1}, {"expected": 2}], [[1, 2], [3]]]
WRITTEN = ["4", 4, 0.5, False, *STRUCTS]
DECIMALS = [Decimal("1.50"), Decimal("2.25")]
TRUTHS = [*WRITTEN, date(2024, 2, 1), DECIMALS[0], DECIMALS, {"on": date(2024, 2, 1)}, b"14", [b"14"]]


@pytest.mark.parametrize("truth", TRUTHS, ids=repr)
@pytest.mark.parametrize("place", ["reward_model", "extra_info", "ground_truth", "answer", "solution"])
def test_a_ground_truth_has_the_value_of_the_file(load, truth, place):
    value = {"ground_truth": truth} if place in ("reward_model", "extra_info") else truth
    (prompt,) = load({"prompt": "p", place: value}, suffix=".parquet")
    assert prompt.ground_truth == truth and type(prompt.ground_truth) is type(truth)
    assert isinstance(prompt.ground_truth_text, str)


@pytest.mark.parametrize(
    ("truth", "text"),
    [("4", "4"), (4, "4"), (False, "False"), (["a", "é"], '["a", "é"]'), ([b"a", Decimal("1.5")], '["a", "1.5"]')],
)
def test_a_ground_truth_as_text(truth, text):
    assert Prompt(0, "", "?", truth).ground_truth_text == text and Prompt(0, "", "?").ground_truth_text is None


@pytest.mark.parametrize("truth", [*WRITTEN, None], ids=repr)
def test_a_ground_truth_that_a_run_writes_is_read_again(load, truth):
    (prompt,) = load({"prompt": "p", "ground_truth": Prompt(0, "", "p", truth).ground_truth_in_files})
    assert prompt.ground_truth == truth


def test_keys_that_parquet_adds_are_absent_at_every_level(load):
    tests = {"inputs": ["1"], "spec": {"a": 1}, "cases": [{"x": 1}, {"y": 2}], "list": [None, 1]}
    own, other = {"deep": {"tests": tests}}, {"fn_name": "f", "spec": {"b": 2}}
    first, second = load(
        {"prompt": "p", "reward_model": {"ground_truth": tests}, "extra_info": own, "own": tests},
        {"prompt": "q", "reward_model": {"ground_truth": other}, "extra_info": {"z": 1}},
        suffix=".parquet",
    )
    assert first.ground_truth == tests and first.extra_info == {**own, "own": tests}
    assert second.ground_truth == other and second.extra_info == {"z": 1}
    (written_by_the_user,) = load({"prompt": "p", "answer": {"a": None}})
    assert written_by_the_user.ground_truth == {"a": None}
