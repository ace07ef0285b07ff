import pytest

from alphaapollo.batching.batch import Rows
from alphaapollo.config.schema import SftData
from alphaapollo.data.examples import load_examples
from alphaapollo.data.rendering import Renderer
from alphaapollo.data.stream import choose_rows
from tests.builders import write_rows

IM_END = 1
USER = {"role": "user", "content": "2+2=?"}
FOUR = {"role": "assistant", "content": "4"}


def write(tmp_path, rows, name="data.jsonl"):
    return write_rows(tmp_path / name, rows)


def trained(renderer, row):
    """The stretches of text that are trained on."""
    parts, current = [], []
    for token, mask in zip([*row.token_ids, 0], [*row.action_mask, 0], strict=True):
        if mask:
            current.append(token)
        elif current:
            parts.append(renderer.tokenizer.decode(current, skip_special_tokens=False))
            current = []
    return parts


def load(tmp_path, renderer, rows, **data):
    return load_examples(write(tmp_path, rows), renderer, SftData(**data)).examples


def test_a_chat_trains_the_answer_and_its_end_token(tmp_path, renderer):
    (row,) = load(tmp_path, renderer, [{"messages": [USER, FOUR]}])
    prompt = renderer.encode_prompt([USER])
    assert row.token_ids == [*prompt, *renderer.encode(["4"])[0], IM_END]  # the newline after the turn is left out
    assert row.action_mask == [0] * len(prompt) + [1, 1]
    assert row.logprobs == [0.0] * len(row.token_ids)


@pytest.mark.parametrize(
    ("row", "name", "is_chat"),
    [
        ({"conversations": [{"from": "human", "value": "2+2=?"}, {"from": "gpt", "value": "4"}]}, "ShareGPT", True),
        ({"conversation": [USER, FOUR]}, "ShareGPT", True),
        ({"instruction": "2+2=?", "input": "", "output": "4"}, "Alpaca", True),
        ({"prompt": [USER], "completion": [FOUR]}, "prompts and completions", True),
        ({"prompt": [USER], "completion": "4"}, "prompts and completions", True),
        ({"prompt": "2+2=", "completion": "4"}, "prompts and completions", False),
    ],
)
def test_common_formats_are_read_directly(tmp_path, renderer, row, name, is_chat):
    own = {"messages": [USER, FOUR]} if is_chat else {"prompt": "2+2=", "response": "4"}
    read = load_examples(write(tmp_path, [row | {"source": "x"}]), renderer, SftData())
    assert read.examples == load(tmp_path, renderer, [own])
    notice = read.notices[0]
    assert f" is read as {name}" in notice and next(iter(row)) in notice and notice.endswith("source.")


def test_alpaca_inputs_follow_the_instruction(tmp_path, renderer):
    (row,) = load(tmp_path, renderer, [{"instruction": "Add.", "input": "2, 2", "output": "4"}])
    assert renderer.encode_prompt([{"role": "user", "content": "Add.\n\n2, 2"}]) == row.token_ids[: row.response_start]


def test_plain_text_is_trained_on_except_its_first_token(tmp_path, renderer):
    (row,) = load(tmp_path, renderer, [{"text": "2+2=4"}])
    ids = renderer.encode(["2+2=4"])[0]
    assert row.token_ids == [*ids, renderer.tokenizer.eos_token_id]
    assert row.action_mask == [0, *[1] * len(ids)]


def test_every_assistant_turn_is_trained_and_nothing_else(tmp_path, renderer):
    chat = [{"role": "system", "content": "s"}, USER, FOUR, USER, {"role": "assistant", "content": "four"}, USER]
    (row,) = load(tmp_path, renderer, [{"messages": chat}])
    assert trained(renderer, row) == ["4<|im_end|>", "four<|im_end|>"]
    assert row.token_ids == renderer.encode([renderer.render_chat(chat[:5], add_generation_prompt=False)])[0][:-1]


def test_text_columns_train_the_response_and_eos(tmp_path, renderer):
    (row,) = load(tmp_path, renderer, [{"prompt": "2+2=", "response": "4"}])
    assert row.token_ids == renderer.encode(["2+2=4"])[0] + [IM_END]
    assert row.action_mask == [0, 0, 0, 0, 1, 1]
    assert Rows.from_rows([row]).response_lengths.tolist() == [2]


def test_chat_prompt_trains_only_the_response(tmp_path, renderer):
    rows = [{"question": [USER, FOUR, USER], "answer": "four"}]
    (row,) = load(tmp_path, renderer, rows, prompt_key="question", response_key="answer")
    assert trained(renderer, row) == ["four<|im_end|>"]


def test_max_samples_are_drawn_with_the_seed(tmp_path, renderer):
    rows = [{"prompt": f"{number}=", "response": "4"} for number in range(20)]
    path, data = write(tmp_path, rows), SftData(seed=3)
    everything = load_examples(path, renderer, data).examples
    some = load_examples(path, renderer, data, max_samples=5).examples
    assert (len(everything), len(some)) == (20, 5)
    assert some == choose_rows(everything, 5, 3, True)
    first = load_examples(path, renderer, SftData(shuffle=False), max_samples=5).examples
    assert first == everything[:5]


def test_number_of_rows_per_file_is_reported(tmp_path, renderer):
    """4 and 6 examples, of which one each is too long."""
    short, long = {"prompt": "a", "response": "b"}, {"prompt": "abcdef", "response": "xyz"}
    files = [write(tmp_path, [long, *[short] * count], f"{count}.jsonl") for count in (3, 5)]
    read = load_examples(files, renderer, SftData(max_length=5, truncation="drop"))
    assert read.file_sizes == [3, 5] and [len(own) for own in read.split_by_file()] == [3, 5]
    assert {len(row.token_ids) for row in read.examples} == {3}
    notice = read.notices[0]
    assert "2 of 10 examples" in notice and "data.max_length" in notice and "dropped" in notice
    assert sum(load_examples(files, renderer, SftData(), max_samples=4).file_sizes) == 4


def test_each_turn_is_an_example_if_the_template_drops_earlier_thoughts(tmp_path, forgetful_renderer):
    """As at inference: the model sees earlier answers without thoughts, and writes its own."""
    thought, chat = {"role": "assistant", "content": "<think>hm</think>4"}, []
    chat = [USER, thought, USER, thought]
    read = load_examples(write(tmp_path, [{"messages": chat}]), forgetful_renderer, SftData())
    first, second = read.examples
    assert trained(forgetful_renderer, first) == trained(forgetful_renderer, second) == ["<think>hm</think>4<|im_end|>"]
    assert first.token_ids[: first.response_start] == forgetful_renderer.encode_prompt(chat[:1])
    assert second.token_ids[: second.response_start] == forgetful_renderer.encode_prompt(chat[:3])
    assert "1 rows are 2 examples" in read.notices[0] and "data.train_turns" in read.notices[0]
    assert load(tmp_path, forgetful_renderer, [{"messages": chat}], train_turns="last") == [second]
    plain = [USER, FOUR, USER, FOUR]
    (row,) = load(tmp_path, forgetful_renderer, [{"messages": plain}])
    assert trained(forgetful_renderer, row) == ["4<|im_end|>", "4<|im_end|>"], "nothing is dropped, one example"


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"messages": [USER]}, ".* no assistant message"),
        ({"messages": []}, "'messages' is empty"),
        ({"messages": "text"}, "'messages' is a str; .*list"),
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, ".*message 1 is empty"),
        ({"prompt": "p", "response": ""}, "'response' is empty"),
        ({"prompt": "p", "response": 4}, "'response' is a int; .*text"),
        ({"prompt": None, "response": "r"}, "'prompt' is empty"),
        ({"prompt": "p"}, "'response' is empty"),
    ],
)
def test_bad_rows_are_named(tmp_path, renderer, row, what):
    good = {"prompt": "p", "response": "r"} | ({"messages": [USER, FOUR]} if "messages" in row else {})
    with pytest.raises(ValueError, match=rf"1 of 2 rows.*\n  row 1: {what}"):
        load(tmp_path, renderer, [good, row])


def test_missing_columns_list_those_there_are(tmp_path, renderer):
    says = r"'messages' or 'prompt' and 'response'.*'prompt', 'answer'\. .*data\.response_key"
    with pytest.raises(ValueError, match=says):
        load(tmp_path, renderer, [{"prompt": "p", "answer": "a"}])


def test_no_chat_template(tmp_path, make_tokenizer):
    with pytest.raises(ValueError, match="no chat template"):
        load(tmp_path, Renderer(make_tokenizer(chat_template=None)), [{"messages": [USER, FOUR]}])


LONG = [{"prompt": "abcdef", "response": "xyz"}, {"prompt": "a", "response": "b"}]  # 10 and 3 tokens


def test_a_long_example_is_an_error_by_default(tmp_path, renderer):
    with pytest.raises(ValueError, match=r"1 of 2 .*max_length=5.*row 0 with 10 "):
        load(tmp_path, renderer, LONG, max_length=5)


def test_a_cut_start_keeps_the_response(tmp_path, renderer):
    row, _ = load(tmp_path, renderer, LONG, max_length=5, truncation="left")
    assert renderer.tokenizer.decode(row.token_ids, skip_special_tokens=False) == "fxyz<|im_end|>"
    assert row.action_mask == [0, 1, 1, 1, 1]
    assert row.turn_ends == [4]
    row, _ = load(tmp_path, renderer, LONG, max_length=3, truncation="left")
    assert row.action_mask == [0, 1, 1], "the first token is never trained"


def test_truncated_example_without_trained_tokens_is_dropped(tmp_path, renderer):
    read = load_examples(write(tmp_path, LONG), renderer, SftData(max_length=5, truncation="right"))
    assert len(read.examples) == 1 and "1 of 2 examples" in read.notices[0] and "(right)" in read.notices[0]
    row, _ = load(tmp_path, renderer, LONG, max_length=8, truncation="right")
    assert renderer.tokenizer.decode(row.token_ids) == "abcdefxy"
    assert row.turn_ends == []


def text_of(renderer, row):
    return renderer.tokenizer.decode(row.token_ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        (
            {"conversations": [{"from": "human", "value": "2+2=?"}, {"from": "gpt", "value": "4"}]},
            ["system", "history"],
        ),
        ({"instruction": "2+2=?", "output": "4"}, ["system", "history"]),
        ({"query": "2+2=?", "response": "4"}, ["system", "history"]),
        ({"messages": [USER, FOUR]}, ["system", "history"]),
        ({"prompt": [USER], "response": "4"}, ["system", "history"]),
        ({"prompt": "2+2=?", "completion": "4"}, ["system", "history"]),
        ({"messages": '[{"role": "user", "content": "2+2=?"}, {"role": "assistant", "content": "4"}]'}, []),
        ({"prompt": "[{'role': 'user', 'content': '2+2=?'}]", "response": "4"}, []),
    ],
)
def test_columns_beside_a_chat_are_read(tmp_path, renderer, row, columns):
    more = {"system": "Be kind.", "history": [["1+1=?", "2"]]}
    (found,) = load(tmp_path, renderer, [row | {name: more[name] for name in columns}])
    earlier = [{"role": "user", "content": "1+1=?"}, {"role": "assistant", "content": "2"}]
    context = [{"role": "system", "content": "Be kind."}, *earlier] if columns else []
    assert text_of(renderer, found) == renderer.render_chat([*context, USER, FOUR], add_generation_prompt=False)[:-1]
    is_chat_column = (
        "prompt" not in row
    )  # history belongs to the prompt, or to the chat, whose turns are all trained on
    assert trained(renderer, found) == ["2<|im_end|>"] * (bool(columns) and is_chat_column) + ["4<|im_end|>"]


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def test_tools_and_variables_of_a_row_reach_the_template(tmp_path, make_tokenizer):
    own = (
        "{% for tool in tools or [] %}{{ tool.function.name }}{{ mark }}{% endfor %}{% for one in messages %}"
        "[{{ one.role }}]{{ one.content }}{% for call in one.tool_calls or [] %}{{ call.function.arguments | tojson }}"
        "{% endfor %}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    renderer = Renderer(make_tokenizer(own), {"mark": "?"})
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}],
    }
    with pytest.raises(ValueError, match="tool calls of message 1"):  # the template writes no names
        load(tmp_path, renderer, [{"messages": [USER, call]}])
    renderer = Renderer(make_tokenizer(own.replace("call.function.arguments", "call.function")), {"mark": "?"})
    rows = [
        {"messages": [USER, call, {"role": "tool", "content": "3"}, FOUR], "tools": '[{"name": "add"}]'},
        {"messages": [USER, FOUR], "tools": [TOOL, TOOL], "chat_template_kwargs": {"mark": "!"}},
        {"messages": [USER, FOUR], "tools": None},
    ]
    with_call, twice, without = load(tmp_path, renderer, rows)
    assert text_of(renderer, with_call) == (
        'add?[user]2+2=?<|im_end|>[assistant]{"name": "add", "arguments": {"a": 1}}<|im_end|>[tool]3<|im_end|>'
        "[assistant]4<|im_end|>"
    )
    assert trained(renderer, with_call) == ['{"name": "add", "arguments": {"a": 1}}<|im_end|>', "4<|im_end|>"]
    assert text_of(renderer, twice).startswith("add!add![user]") and text_of(renderer, without).startswith("[user]")


@pytest.mark.parametrize("column", ["reasoning", "reasoning_content", "thinking"])
def test_thoughts_in_a_column_are_those_of_the_answer(tmp_path, renderer, column):
    rows = [
        {"messages": [USER, FOUR]},
        {"instruction": "2+2=?", "output": "4"},
        {"prompt": [USER], "response": "4"},
        {"prompt": "2+2=", "response": "4"},
    ]
    for row in rows:
        read = load_examples(write(tmp_path, [row | {column: "hm"}]), renderer, SftData())
        (found,) = read.examples
        assert trained(renderer, found) == ["<think>\nhm\n</think>\n\n4<|im_end|>"]
        assert not any(column in notice for notice in read.notices)


def test_weights_choose_the_turns(tmp_path, renderer):
    chat = [USER, FOUR | {"weight": 0}, USER, FOUR | {"weight": 1}, USER, FOUR]
    (row,) = load(tmp_path, renderer, [{"messages": chat}])
    assert trained(renderer, row) == ["4<|im_end|>", "4<|im_end|>"]
    (last,) = load(tmp_path, renderer, [{"messages": chat}], train_turns="last")
    assert trained(renderer, last) == ["4<|im_end|>"] and last.token_ids == row.token_ids
    (answer,) = load(tmp_path, renderer, [{"prompt": [USER], "response": [FOUR | {"train": False}, USER, FOUR]}])
    assert trained(renderer, answer) == ["4<|im_end|>"]


def test_columns_that_are_not_read_are_listed_once(tmp_path, renderer):
    rows = [
        {"messages": [USER, FOUR], "id": 1, "source": "x", "data_source": "y", "tools": None},
        {"messages": [USER, FOUR]},
    ]
    (notice,) = load_examples(write(tmp_path, rows), renderer, SftData()).notices
    assert notice.endswith("not read: id, source.")
    assert load_examples(write(tmp_path, [{"messages": [USER, FOUR], "id": None}]), renderer, SftData()).notices == []


def test_max_samples_count_rows(tmp_path, forgetful_renderer):
    thought = {"role": "assistant", "content": "<think>hm</think>4"}
    path = write(tmp_path, [{"messages": [USER, thought, USER, thought]}] * 3)
    read = load_examples(path, forgetful_renderer, SftData(), max_samples=2)
    assert len(read.examples) == 4 and read.file_sizes == [4] and "2 rows are 4 examples" in read.notices[0]


def test_a_long_example_is_named_by_its_row_in_its_file(tmp_path, renderer):
    files = [write(tmp_path, [{"messages": [USER, FOUR]}] * 2, name) for name in ("a.jsonl", "b.jsonl")]
    write(tmp_path, [{"messages": [USER, FOUR]}, {"messages": [USER, FOUR | {"content": "four" * 99}]}], "b.jsonl")
    data = SftData(max_length=100, truncation="error")
    for entry in (files, str(tmp_path / "*.jsonl")):
        with pytest.raises(ValueError, match=r"The first is .*b\.jsonl, row 1 with"):
            load_examples(entry, renderer, data)
