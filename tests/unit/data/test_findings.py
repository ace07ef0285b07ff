"""What a run does not read in its data is named, and what it reads under other names."""

import pyarrow
import pyarrow.parquet
import pytest

from alphaapollo.data.findings import find_unread_content
from alphaapollo.data.prompts import load_prompts
from alphaapollo.data.rendering import Renderer
from tests.builders import write_rows
from tests.unit.data.rows import FOUR, USER
from tests.unit.tool_templates import HERMES, schema, tokenizer_of

NAMED = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}{% if message.mood %} ({{ message.mood }})"
    "{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


EXCLUDED = [{"step_loss_mask": 0}, {"trainable": False}, {"loss_mask": 0}, {"weight": 0}]
EXCLUDED += [{"loss": False}, {"loss_scale": 0.0}, {"mask": True}, {"masked": True}]


@pytest.mark.parametrize("keys", EXCLUDED, ids=str)
def test_messages_that_other_trainers_leave_out_are_not_trained_on(loader, keys):
    wrong = {"role": "assistant", "content": "WRONG"} | keys
    assert loader.trained({"messages": [USER, wrong, USER, FOUR]}) == [["4<|im_end|>"]]
    assert loader.sft({"messages": [USER, wrong, USER, FOUR]}).findings == []
    included = {
        key: 1 - value if isinstance(value, int) and key not in ("mask", "masked") else not value
        for key, value in keys.items()
    }
    assert loader.trained({"messages": [USER, FOUR | included]}) == [["4<|im_end|>"]]


def test_a_mask_that_may_mean_both_is_refused(loader):
    with pytest.raises(ValueError, match="mask=1 is not supported"):
        loader.sft({"messages": [USER, FOUR | {"mask": 1}]})


def test_a_column_of_weights_is_one_weight_for_each_message(loader):
    chat = [USER, {"role": "assistant", "content": "WRONG"}, USER, FOUR]
    assert loader.trained({"messages": chat, "loss_mask": [0, 0, 0, 1]}) == [["4<|im_end|>"]]
    with pytest.raises(ValueError, match="3 values for 4 messages"):
        loader.sft({"messages": chat, "loss_mask": [0, 0, 1]})


def test_a_first_answer_is_seen_but_not_trained_on(loader):
    row = {"conversations": [{"from": "gpt", "value": "Hi."}, {"from": "human", "value": "2+2=?"}, FOUR]}
    assert loader.trained(row) == [["4<|im_end|>"]]
    assert any("before the first question" in one.content for one in loader.sft(row).findings)


def test_keys_that_the_template_does_not_show_are_named(tmp_path):
    renderer, chat = Renderer(tokenizer_of(NAMED)), [USER | {"mood": "good", "lang": "en"}]
    rows = [{"prompt": [USER | {"mood": ""}]}, {"prompt": chat}, {"prompt": [USER | {"lang": None, "toxic": False}]}]
    found = find_unread_content("x", rows, {"prompt"}, None, renderer)
    assert [(one.content, one.rows, one.total) for one in found] == [
        ("the key of messages 'lang'", 1, 3),
        ("the key of messages 'toxic'", 1, 3),
    ]


def test_variables_that_the_template_does_not_read_are_named():
    row = {"messages": [USER, FOUR], "tools": [schema("f", a="integer")]}
    row |= {"chat_template_kwargs": {"custom_instructions": "Be brief."}}
    found = [
        find_unread_content("x", [row], {"messages"}, ("tools",), Renderer(tokenizer_of(one)))
        for one in (HERMES, NAMED)
    ]
    assert [one.content for one in found[0]][1:] == ["the variable 'custom_instructions'"]
    assert [one.content for one in found[1]][1:] == ["the variable 'custom_instructions'", "the variable 'tools'"]


OTHER_NAMES = [({name: "5"}, "5") for name in ("expected_answer", "final_answer", "golden_answers", "Answer", "label")]
OTHER_NAMES += [({"answers": ["5", "five"]}, ["5", "five"]), ({"final_answer": "5", "solution": "so 5"}, "5")]


@pytest.mark.parametrize(("columns", "truth"), OTHER_NAMES, ids=str)
def test_truths_in_columns_of_other_names_are_read_and_named(tmp_path, columns, truth):
    found = []
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": [USER], "dataset": ["gsm8k"], **columns}])
    (prompt,) = load_prompts(path, "prompt", findings=found)
    assert (prompt.ground_truth, prompt.data_source) == (truth, "gsm8k")
    assert [one.effect for one in found] == ["read as the ground truth", "read as data_source"]
    assert next(iter(columns)) in found[0].content


def test_json_as_text_and_marks_of_images_are_named(tmp_path, loader):
    row = {"prompt": [USER], "plan": '{"a": 1}', "answer": '["5"]'}
    (finding,) = find_unread_content("x", [row], {"prompt"}, None, None)
    assert "plan" in finding.content and "JSON" in finding.content
    (finding,) = loader.sft({"messages": [{"role": "user", "content": "<image> What?"}, FOUR]}).findings
    assert "<image>" in finding.content
    with pytest.raises(ValueError, match=r"cannot read the image|does not read images"):
        loader.sft({"messages": [{"role": "user", "content": "<image> What?"}, FOUR], "image": "no.jpg"})


def test_folders_of_partitions_are_columns(tmp_path):
    for level in ("easy", "hard"):
        (tmp_path / "data" / f"level={level}").mkdir(parents=True)
        table = pyarrow.Table.from_pylist([{"question": "2+2?", "answer": "4"}])
        pyarrow.parquet.write_table(table, tmp_path / "data" / f"level={level}" / "0.parquet")
    prompts = load_prompts(str(tmp_path / "data"), "prompt")
    assert [prompt.extra_info["level"] for prompt in prompts] == ["easy", "hard"]


TEXT = "question;answer\n1+1=?;2\n"
FILES = [
    ("a.csv", TEXT.encode()),
    ("b.tsv", TEXT.encode()),
    ("c.csv", TEXT.replace(";", "\t").encode("utf-16")),
]
FILES += [
    ("d.jsonl", '{"question": "1+1=?", "answer": "2"}'.encode("utf-16")),
    ("e.csv", TEXT.replace(";", ",").encode()),
]


@pytest.mark.parametrize(("name", "content"), FILES)
def test_tables_with_other_separators_and_encodings_are_read(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    (prompt,) = load_prompts(str(tmp_path / name), "prompt")
    assert (prompt.content[0]["content"], prompt.ground_truth) == ("1+1=?", "2")
