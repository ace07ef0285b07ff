"""Rows of ms-swift: the same tokens as rows in the formats of this project."""

import pytest

from alphaapollo.config.schema import PreferenceData, RewardData, SftData
from alphaapollo.data.examples import load_examples
from alphaapollo.data.formats import PAIR_FORMATS
from alphaapollo.data.preference_examples import load_preferences
from alphaapollo.data.prompts import load_prompts
from tests.builders import write_rows

SYSTEM = {"role": "system", "content": "be kind"}
USER = {"role": "user", "content": "2+2=?"}
FOUR = {"role": "assistant", "content": "4"}
FIVE = {"role": "assistant", "content": "it is 5"}
TURN = [{"role": "user", "content": "1+1=?"}, {"role": "assistant", "content": "2"}]
CALL = {"role": "tool_call", "content": '{"name": "add", "arguments": {"a": 2}}'}


def list_pair_tokens(tmp_path, renderer, row):
    path = write_rows(tmp_path / "rows.jsonl", [row])
    (pair,) = load_preferences(path, renderer, RewardData()).examples
    return [(one.token_ids, one.action_mask) for one in pair.rows], pair.margin


@pytest.mark.parametrize(
    ("row", "same"),
    [
        ({"messages": [USER, FOUR], "rejected_response": "it is 5"}, {}),
        ({"messages": [USER, FOUR], "rejected_response": [FIVE], "margin": 2.0}, {"margin": 2.0}),
        ({"messages": [USER, FOUR], "rejected_messages": [USER, FIVE]}, {}),
        ({"messages": '[{"role": "user", "content": "2+2=?"}, {"role": "assistant", "content": "4"}]',
          "rejected_response": "it is 5"}, {}),
        ({"query": "2+2=?", "response": "4", "rejected_response": "it is 5"}, {}),
        ({"system": "be kind", "query": "2+2=?", "response": "4", "rejected_response": "it is 5",
          "history": [["1+1=?", "2"]]},
         {"prompt": [SYSTEM, *TURN, USER]}),
        ({"messages": [SYSTEM, *TURN, USER, FOUR], "rejected_response": "it is 5"}, {"prompt": [SYSTEM, *TURN, USER]}),
    ],
)  # fmt: skip
def test_pairs(tmp_path, renderer, row, same):
    plain = {"prompt": [USER], "chosen": [FOUR], "rejected": [FIVE]} | same
    assert list_pair_tokens(tmp_path, renderer, row) == list_pair_tokens(tmp_path, renderer, plain)


def test_rejected_response_replaces_calls_after_the_last_user():
    answer = [CALL, {"role": "tool_response", "content": "4"}, FOUR]
    row = {"messages": [*TURN, USER, *answer], "rejected_response": [FIVE]}
    converted = next(one for one in PAIR_FORMATS if {*one.columns} <= row.keys()).convert(row)
    assert converted == {"prompt": [*TURN, USER], "chosen": answer, "rejected": [FIVE]}


def test_labelled_chats(tmp_path, renderer):
    rows = [{"messages": [USER, FOUR], "label": True}, {"messages": [TURN[0], FIVE], "label": False}]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    read = load_preferences(path, renderer, PreferenceData(), single_answers=True).examples
    assert [one.is_good for one in read] == [[True], [False]]
    ends = [renderer.tokenizer.decode(one.rows[0].token_ids[one.rows[0].response_start :]) for one in read]
    assert [end.startswith(text) for end, text in zip(ends, ("4", "it is 5"), strict=True)] == [True, True]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [*TURN, USER]},
        {"messages": [*TURN, USER, FOUR]},
        {"query": "2+2=?", "history": [["1+1=?", "2"]]},
    ],
)
def test_prompts(tmp_path, row):
    (prompt,) = load_prompts(write_rows(tmp_path / "rows.jsonl", [row | {"solution": "4", "level": 3}]), "prompt")
    assert [(one["role"], one["content"]) for one in prompt.content] == [
        (one["role"], one["content"]) for one in [*TURN, USER]
    ]
    assert (prompt.ground_truth, prompt.extra_info["level"]) == ("4", 3)
    assert "messages" not in prompt.extra_info  # reward functions get the chat with the completion


def test_turns_of_humans_and_assistants(tmp_path, renderer):
    first = {"conversation": [{"human": "1+1=?", "assistant": "2"}, {"human": "2+2=?", "assistant": "4"}]}
    found = [
        load_examples(write_rows(tmp_path / "rows.jsonl", [row]), renderer, SftData()).examples
        for row in (first, {"messages": [*TURN, USER, FOUR]})
    ]
    assert [row.token_ids for row in found[0]] == [row.token_ids for row in found[1]]


BOXES = {"ref": ["cat"], "bbox": [[1, 2, 3, 4]]}


@pytest.mark.parametrize(
    ("columns", "name"),
    [
        ({"objects": BOXES}, "objects"),
        ({"objects": '{"ref": [], "bbox": [[1, 2, 3, 4]]}'}, "objects"),
        ({"videos": ["a.mp4"]}, "videos"),
        ({"audios": ["a.wav"]}, "audios"),
    ],
)
def test_boxes_videos_and_audio_are_refused_with_the_row(tmp_path, renderer, columns, name):
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": [USER, FOUR], "rejected_response": "5"} | columns])
    for load in (
        lambda: load_prompts(path, "prompt"),
        lambda: load_examples(path, renderer, SftData()),
        lambda: load_preferences(path, renderer, RewardData()),
    ):
        with pytest.raises(ValueError, match=name) as error:
            load()
        assert "row 0" in str(error.value)


@pytest.mark.parametrize("columns", [{"objects": None}, {"objects": 3}, {"videos": []}, {"objects": {}}])
def test_empty_and_other_columns_are_read(tmp_path, columns):
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": [USER]} | columns])
    assert len(load_prompts(path, "prompt")) == 1


def test_other_images_of_the_rejected_answer_are_refused(tmp_path, renderer):
    row = {"messages": [USER, FOUR], "rejected_response": "5", "rejected_images": ["b.png"]}
    with pytest.raises(ValueError, match="rejected_images"):
        load_preferences(write_rows(tmp_path / "rows.jsonl", [row]), renderer, RewardData())


def test_a_chat_without_a_user_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no message of the user"):
        load_prompts(write_rows(tmp_path / "rows.jsonl", [{"messages": [FOUR]}]), "prompt")
