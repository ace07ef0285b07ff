"""Rows of ms-swift: prompts and chats as in the formats of this project. test_preference_examples.py has its pairs."""

import pytest

from alphaapollo.data.prompts import load_prompts
from tests.builders import write_rows
from tests.unit.data.rows import EARLIER, FOUR, USER


def prompts(folder, row):
    return load_prompts(write_rows(folder / "rows.jsonl", [row]), "prompt")


PROMPTS = [
    {"messages": [*EARLIER, USER]},
    {"messages": [*EARLIER, USER, FOUR]},
    {"query": "2+2=?", "history": [["1+1=?", "2"]]},
]


@pytest.mark.parametrize("row", PROMPTS)
def test_prompts(tmp_path, row):
    (prompt,) = prompts(tmp_path, row | {"solution": "4", "level": 3})
    assert [{"role": one["role"], "content": one["content"]} for one in prompt.content] == [*EARLIER, USER]
    assert (prompt.ground_truth, prompt.extra_info["level"]) == ("4", 3)
    assert "messages" not in prompt.extra_info  # reward functions get the chat with the completion


def test_turns_of_humans_and_assistants(loader):
    turns = [{"human": "1+1=?", "assistant": "2"}, {"human": "2+2=?", "assistant": "4"}]
    assert loader.sft({"conversation": turns}).examples == loader.sft({"messages": [*EARLIER, USER, FOUR]}).examples


REFUSED_COLUMNS = [
    {"objects": {"ref": ["cat"], "bbox": [[1, 2, 3, 4]]}},
    {"objects": '{"ref": [], "bbox": [[1, 2, 3, 4]]}'},
    {"videos": ["a.mp4"]},
    {"audios": ["a.wav"]},
]


@pytest.mark.parametrize("columns", REFUSED_COLUMNS)
def test_boxes_videos_and_audio_are_refused_with_the_row(tmp_path, loader, columns):
    row = {"messages": [USER, FOUR], "rejected_response": "5"} | columns
    for load in (lambda row: prompts(tmp_path, row), loader.sft, loader.pairs):
        with pytest.raises(ValueError, match=f"(?s)row 0.*{next(iter(columns))}"):
            load(row)


def test_a_chat_without_a_user_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no message of the user"):
        prompts(tmp_path, {"messages": [FOUR]})
