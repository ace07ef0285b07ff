"""Chats as people have them: names of roles, tool calls, thoughts, weights, and the columns beside a chat."""

import json

import pytest

from alphaapollo.data.chats import join_context, read_chat, read_chat_text, read_context, read_template_arguments

USER, FOUR = {"role": "user", "content": "2+2=?"}, {"role": "assistant", "content": "4"}


def read(*messages):
    return read_chat([*messages], "'messages'")


def make_call(name="add", arguments=None, number=0):
    function = {"name": name, "arguments": {"a": 1} if arguments is None else arguments}
    return {"id": f"call{number:05}", "type": "function", "function": function}


ROLES = [
    *((name, "user") for name in ("user", "User", " USER ", "human", "Human")),
    *((name, "assistant") for name in ("assistant", "Assistant", "gpt", "GPT", "bot", "chatbot", "model", "AI")),
    *((name, "system") for name in ("system", "System", "developer")),
    *((name, "tool") for name in ("tool", "function", "observation", "ipython", "tool_response")),
    ("critic", "critic"),
]


@pytest.mark.parametrize(("name", "role"), ROLES)
def test_names_of_roles(name, role):
    assert (
        read({"role": name, "content": "x"}) == read({"from": name, "value": "x"}) == [{"role": role, "content": "x"}]
    )


CALLS = [
    {"role": "assistant", "content": None, "tool_calls": [make_call()]},
    {"role": "assistant", "tool_calls": [make_call(arguments='{"a": 1}')]},
    {"role": "assistant", "content": None, "tool_calls": [{"name": "add", "arguments": {"a": 1}}]},
    {"role": "assistant", "content": None, "tool_calls": json.dumps([make_call()])},
    {"role": "assistant", "content": None, "tool_calls": [make_call(arguments={"a": 1, "b": None})]},  # parquet
    {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 1}'}},
    {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
    {"role": "tool_call", "content": "[{'name': 'add', 'arguments': {'a': 1}}]"},
]


@pytest.mark.parametrize("message", CALLS)
def test_shapes_of_a_call(message):
    assert read(USER, message)[1] == {"role": "assistant", "content": "", "tool_calls": [make_call()]}


def test_results_get_the_id_and_the_name_of_their_call():
    calls = [{"name": name, "arguments": {}} for name in ("add", "sub")]
    results = [{"role": "tool", "content": "1", "tool_call_id": "call00001"}, {"role": "function", "content": {"b": 2}}]
    _, call, second, first = read(USER, {"role": "assistant", "content": "Let me.", "tool_calls": calls}, *results)
    assert [one["id"] for one in call["tool_calls"]] == ["call00000", "call00001"] and call["content"] == "Let me."
    assert (second["name"], first["name"], first["tool_call_id"]) == ("sub", "add", "call00000")
    assert first["content"] == '{"b": 2}'
    own = read(USER, {"role": "assistant", "tool_calls": [make_call() | {"id": "x"}]}, {"role": "tool", "content": "3"})
    assert (own[1]["tool_calls"][0]["id"], own[2]["tool_call_id"]) == ("x", "x")


def test_results_with_the_id_of_no_call_belong_to_the_only_call():
    first, second = make_call() | {"id": 7}, make_call() | {"id": 8}
    result = {"role": "tool", "content": "3", "tool_call_id": "x"}
    assert read(USER, {"role": "assistant", "tool_calls": [first]}, result)[2]["tool_call_id"] == "7"
    both = {"role": "assistant", "tool_calls": [first, second]}
    with pytest.raises(ValueError, match=r"'messages' .*tool_call_id='x', .* 7, 8\. Use"):
        read(USER, both, result)
    assert read(USER, both, result | {"tool_call_id": 8})[2]["tool_call_id"] == "8"


def test_calls_that_follow_each_other_are_one_message():
    calls = [{"from": "function_call", "value": f'{{"name": "{name}", "arguments": {{}}}}'} for name in "fg"]
    said = {"from": "gpt", "value": "Let me."}
    (message,) = read(said, *calls)
    assert message["content"] == "Let me." and [one["function"]["name"] for one in message["tool_calls"]] == ["f", "g"]
    assert [one["id"] for one in message["tool_calls"]] == ["call00000", "call00001"]


WITH_THOUGHTS = [
    *({"role": "assistant", "content": "4", key: "hm"} for key in ("reasoning_content", "reasoning", "thinking")),
    {"role": "gpt", "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "4"}]},
]


@pytest.mark.parametrize("message", WITH_THOUGHTS)
def test_thoughts_have_the_names_that_templates_read(message):
    assert read(message) == [FOUR | {"reasoning_content": "hm", "thinking": "hm"}]


@pytest.mark.parametrize("key", ["weight", "train", "training", "loss", "loss_scale"])
def test_weights(key):
    for value in (0, 0.0, False):
        assert read(USER, FOUR | {key: value})[1] == FOUR | {"train": False}
    for value in (1, 1.0, True, None):
        assert read(USER | {key: 0}, FOUR | {key: value}) == [USER, FOUR]
    for value in (0.5, 2, "0"):
        with pytest.raises(ValueError, match=f"{key}=.*{value}"):
            read(USER, FOUR | {key: value})


def test_weights_of_parts_are_refused():
    span = [{"begin_offset": 0, "end_offset": 1, "train": False}]
    for key in ("train_detail", "training_detail"):
        assert read(FOUR | {key: []}) == [FOUR]
        with pytest.raises(ValueError, match=key):
            read(FOUR | {key: span})


BAD_MESSAGES = [
    ({"content": "x"}, "role, content"),
    ("x", "role, content"),
    ({"role": "user", "content": 3}, "text or parts"),
    ({"from": "function_call", "value": "add(1)"}, "'add\\(1\\)'"),
    ({"role": "assistant", "tool_calls": [{"name": "add", "arguments": "a=1"}]}, "a=1"),
    ({"role": "assistant", "tool_calls": [{"arguments": {}}]}, "the tool call"),
    ({"role": "assistant", "content": "4", "reasoning": 3}, "'reasoning' is 3"),
]


@pytest.mark.parametrize(("message", "says"), BAD_MESSAGES)
def test_bad_messages(message, says):
    with pytest.raises(ValueError, match=f"'messages' .*{says}"):
        read(USER, message)


def test_columns_before_a_chat():
    system = {"role": "system", "content": "Be kind."}
    assert read_context({}) == read_context({"system": None, "history": None}) == read_context({"system": " "}) == []
    expected = [system, {"role": "user", "content": "1+1=?"}, {"role": "assistant", "content": "2"}]
    for history in ([["1+1=?", "2"]], '[["1+1=?", "2"]]'):
        assert read_context({"system": "Be kind.", "history": history}) == expected
    assert join_context([system], [USER]) == join_context([system], [system, USER]) == [system, USER]
    with pytest.raises(ValueError, match="'system'"):
        join_context([system], [system | {"content": "Be brief."}, USER])
    for row in ({"system": 3}, {"history": ["a"]}, {"history": [["a"]]}):
        with pytest.raises(ValueError, match=f"'{next(iter(row))}'"):
            read_context(row)


def test_columns_for_the_template():
    bare = {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}}
    schema = {"type": "function", "function": bare}
    with_none = {**schema, "function": {**bare, "strict": None}}
    for tools in ([schema], [bare], json.dumps([schema]), json.dumps(schema), [json.dumps(bare)], [with_none]):
        assert read_template_arguments({"tools": tools}) == {"tools": [schema]}
    for kwargs in ({"enable_thinking": False, "effort": None}, '{"enable_thinking": false}'):
        assert read_template_arguments({"chat_template_kwargs": kwargs}) == {"enable_thinking": False}
    assert read_template_arguments({"enable_thinking": False}) == {"enable_thinking": False}
    for empty in (None, [], "", "[]"):
        assert read_template_arguments({"tools": empty, "chat_template_kwargs": None}) == {}
    for row in ({"tools": "add"}, {"tools": [{"type": "function"}]}, {"chat_template_kwargs": "thinking"}):
        with pytest.raises(ValueError, match=f"'{next(iter(row))}'"):
            read_template_arguments(row)


def test_chats_that_were_written_as_text():
    chat = [USER, FOUR]
    assert read_chat_text(json.dumps(chat)) == read_chat_text(str(chat)) == chat
    assert read_chat_text(json.dumps(FOUR)) == [FOUR]
    calls = [{"role": "assistant", "tool_calls": [make_call()]}, {"role": "tool", "content": "3"}]
    assert read_chat_text(json.dumps(calls)) == calls
    for value in (
        "2+2=?",
        "[1, 2]",
        '[{"content": "x"}]',
        '{"from": "Oslo", "value": 2}',
        '{"role": "user"}',
        chat,
        None,
    ):
        assert read_chat_text(value) is None
