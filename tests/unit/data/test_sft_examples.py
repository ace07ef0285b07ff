import pytest

from alphaapollo.batching.batch import Rows
from alphaapollo.config.schema import SftData
from alphaapollo.data.examples import (
    LoadedExamples,
    load_examples,
    make_source_names,
)
from alphaapollo.data.rendering import Renderer
from alphaapollo.data.stream import choose_rows
from tests.builders import write_rows
from tests.unit.data.rows import CHAT_AS_TEXT, EARLIER, FOUR, IM_END, SYSTEM, THOUGHT, USER, Loader, text_of, trained

CHAT = {"messages": [USER, FOUR]}
TEXT = {"prompt": "2+2=", "response": "4"}
FOUR_WORD = {"role": "assistant", "content": "four"}
WEIGHTED = [USER, FOUR | {"weight": 0}, USER, FOUR | {"weight": 1}, USER, FOUR]


def test_a_chat_trains_the_answer_and_its_end_token(loader):
    (row,) = loader.sft(CHAT).examples
    prompt = loader.renderer.encode_prompt([USER])
    assert [*row.token_ids] == [
        *prompt,
        *loader.renderer.encode(["4"])[0],
        IM_END,
    ]  # without the newline after the turn
    assert [*row.action_mask] == [0] * len(prompt) + [1, 1]
    assert [*row.logprobs] == [0.0] * len(row.token_ids)


def test_texts_train_the_response_and_eos_or_all_but_the_first_token(loader):
    (row,) = loader.sft(TEXT).examples
    assert [*row.token_ids] == loader.renderer.encode(["2+2=4"])[0] + [IM_END]
    assert [*row.action_mask] == [0, 0, 0, 0, 1, 1]
    assert Rows.from_rows([row]).response_lengths.tolist() == [2]
    (plain,) = loader.sft({"text": "2+2=4"}).examples
    assert plain.token_ids == row.token_ids and [*plain.action_mask] == [0, 1, 1, 1, 1, 1]


TRAINED = [
    ({"messages": [SYSTEM, USER, FOUR, USER, FOUR_WORD, USER]}, {}, ["4<|im_end|>", "four<|im_end|>"]),
    ({"q": [USER, FOUR, USER], "a": "four"}, {"prompt_key": "q", "response_key": "a"}, ["four<|im_end|>"]),
    ({"messages": WEIGHTED}, {}, ["4<|im_end|>", "4<|im_end|>"]),
    ({"messages": WEIGHTED}, {"train_turns": "last"}, ["4<|im_end|>"]),
    ({"prompt": [USER], "response": [FOUR | {"train": False}, USER, FOUR]}, {}, ["4<|im_end|>"]),
    *(
        (row | {column: "hm"}, {}, ["<think>\nhm\n</think>\n\n4<|im_end|>"])
        for column in ("reasoning", "reasoning_content", "thinking")
        for row in (CHAT, {"instruction": "2+2=?", "output": "4"}, {"prompt": [USER], "response": "4"}, TEXT)
    ),
]


@pytest.mark.parametrize(("row", "settings", "texts"), TRAINED)
def test_assistant_turns_are_trained_and_nothing_else(loader, row, settings, texts):
    read = loader.sft(row, **settings)
    assert [trained(loader.renderer, one) for one in read.examples] == [texts]
    assert not any("reasoning" in notice or "thinking" in notice for notice in read.notices)


FORMATS = [
    ({"conversations": [{"from": "human", "value": "2+2=?"}, {"from": "gpt", "value": "4"}]}, "ShareGPT", True),
    ({"instruction": "2+2=?", "input": "", "output": "4"}, "Alpaca", True),
    ({"prompt": [USER], "completion": [FOUR]}, "prompts and completions", True),
    ({"prompt": [USER], "completion": "4"}, "prompts and completions", True),
    ({"prompt": "2+2=", "completion": "4"}, "prompts and completions", False),
]


@pytest.mark.parametrize(("row", "name", "is_chat"), FORMATS)
def test_common_formats_are_read_directly(loader, row, name, is_chat):
    read = loader.sft(row | {"source": "x"})
    assert read.examples == loader.sft(CHAT if is_chat else TEXT).examples
    guess, unread = read.findings
    assert name in guess.effect and next(iter(row)) in guess.content and "source" in unread.content


def test_alpaca_inputs_follow_the_instruction(loader):
    (row,) = loader.sft({"instruction": "Add.", "input": "2, 2", "output": "4"}).examples
    prompt = loader.renderer.encode_prompt([{"role": "user", "content": "Add.\n\n2, 2"}])
    assert prompt == [*row.token_ids[: row.response_start]]


BESIDE_A_CHAT = [
    ({"conversations": [{"from": "human", "value": "2+2=?"}, {"from": "gpt", "value": "4"}]}, True),
    ({"instruction": "2+2=?", "output": "4"}, True),
    ({"query": "2+2=?", "response": "4"}, True),
    (CHAT, True),
    ({"prompt": [USER], "response": "4"}, True),
    ({"prompt": "2+2=?", "completion": "4"}, True),
    ({"messages": CHAT_AS_TEXT}, False),
    ({"prompt": "[{'role': 'user', 'content': '2+2=?'}]", "response": "4"}, False),
]


@pytest.mark.parametrize(("row", "has_context"), BESIDE_A_CHAT)
def test_columns_beside_a_chat_are_read(loader, row, has_context):
    columns = {"system": "be kind", "history": [["1+1=?", "2"]]} if has_context else {}
    (found,) = loader.sft(row | columns).examples
    chat = [*([SYSTEM, *EARLIER] if has_context else []), USER, FOUR]
    shown = loader.renderer.render_chat(chat, add_generation_prompt=False)[:-1]
    assert text_of(loader.renderer, found.token_ids) == shown
    # history belongs to the prompt, or to the chat, whose turns are all trained on
    earlier = ["2<|im_end|>"] if has_context and "prompt" not in row else []
    assert trained(loader.renderer, found) == [*earlier, "4<|im_end|>"]


@pytest.mark.parametrize(("row", "has_context"), BESIDE_A_CHAT)
def test_system_prompt_of_all_rows(loader, row, has_context):
    (found,) = loader.sft(row, system_prompt="be kind").examples
    shown = loader.renderer.render_chat([SYSTEM, USER, FOUR], add_generation_prompt=False)[:-1]
    assert text_of(loader.renderer, found.token_ids) == shown
    assert loader.sft(row | {"system": "be kind"}, system_prompt="other").examples == [found]


def test_system_prompt_needs_chats(loader):
    with pytest.raises(ValueError, match=r"data\.system_prompt is for chats, but the row is a plain text"):
        loader.sft({"text": "once"}, system_prompt="be kind")


def test_max_samples_are_rows_drawn_with_the_seed(loader, tmp_path, forgetful_renderer):
    rows = [{"prompt": f"{number}=", "response": "4"} for number in range(20)]
    everything, some = loader.sft(*rows, seed=3).examples, loader.sft(*rows, seed=3, max_samples=5).examples
    assert (len(everything), some) == (20, choose_rows(everything, 5, 3, True)) and len(some) == 5
    assert loader.sft(*rows, shuffle=False, max_samples=5).examples == everything[:5]
    chats = [{"messages": [USER, THOUGHT, USER, THOUGHT]}] * 3
    read = Loader(tmp_path, forgetful_renderer).sft(*chats, max_samples=2)
    assert len(read.examples) == 4 and read.file_sizes == [4] and "2 rows are 4 examples" in read.notices[0]


def test_number_of_rows_per_file_is_reported(tmp_path, renderer):
    """4 and 6 examples, of which one each is too long."""
    short, long = {"prompt": "a", "response": "b"}, {"prompt": "abcdef", "response": "xyz"}
    files = [write_rows(tmp_path / f"{count}.jsonl", [long, *[short] * count]) for count in (3, 5)]
    read = load_examples(files, renderer, SftData(max_length=5, truncation="drop"))
    assert read.file_sizes == [3, 5] and [len(own) for own in read.split_by_file()] == [3, 5]
    assert {len(row.token_ids) for row in read.examples} == {3}
    assert all(fact in read.notices[0] for fact in ("2 of 10 examples", "data.max_length", "dropped"))
    assert sum(load_examples(files, renderer, SftData(), max_samples=4).file_sizes) == 4
    assert LoadedExamples(["a", "b", "c"], file_sizes=[2, 0, 1], notices=[]).split_by_file() == [["a", "b"], [], ["c"]]


SOURCES = [
    ("data/train.parquet", ["train"]),
    (["data/maths.parquet", "data/code.jsonl"], ["maths", "code"]),
    (["a/train.parquet", "b/train.parquet"], ["a/train", "b/train"]),
    (["org/name-1.5#train", "chats"], ["name-1.5#train", "chats"]),
    (["a/x.json", "./a/x.parquet", "b/y.json"], ["x.json", "x.parquet", "y.json"]),
    (["a/b.parquet", "a/b.parquet"], ["b", "b"]),  # the same file twice
]


@pytest.mark.parametrize(("files", "names"), SOURCES)
def test_names_of_sources_are_as_short_as_possible_and_distinct(files, names):
    assert make_source_names(files) == names


def test_each_turn_is_an_example_if_the_template_drops_earlier_thoughts(tmp_path, forgetful_renderer):
    """As at inference: the model sees earlier answers without thoughts, and writes its own."""
    loader, chat = Loader(tmp_path, forgetful_renderer), [USER, THOUGHT, USER, THOUGHT]
    read = loader.sft({"messages": chat})
    for row, start in zip(read.examples, (1, 3), strict=True):
        assert trained(forgetful_renderer, row) == ["<think>hm</think>4<|im_end|>"]
        assert [*row.token_ids[: row.response_start]] == forgetful_renderer.encode_prompt(chat[:start])
    assert "1 rows are 2 examples" in read.notices[0] and "data.train_turns" in read.notices[0]
    assert loader.sft({"messages": chat}, train_turns="last").examples == read.examples[1:]
    assert loader.trained({"messages": [USER, FOUR, USER, FOUR]}) == [["4<|im_end|>", "4<|im_end|>"]]  # nothing dropped


BAD_ROWS = [
    ({"messages": [USER]}, ".* no assistant message"),
    ({"messages": "text"}, "'messages' is a str; .*list"),
    ({"messages": [USER, {"role": "assistant", "content": ""}]}, ".*message 1 is empty"),
    ({"prompt": "p", "response": ""}, "'response' is empty"),
    ({"prompt": "p", "response": 4}, "'response' is a int; .*text"),
]


@pytest.mark.parametrize(("row", "what"), BAD_ROWS)
def test_bad_rows_are_named(loader, row, what):
    good = {"prompt": "p", "response": "r"} | (CHAT if "messages" in row else {})
    with pytest.raises(ValueError, match=rf"1 of 2 rows.*\n  row 1: {what}"):
        loader.sft(good, row)


def test_missing_columns_and_a_missing_template(loader, tmp_path, make_tokenizer):
    says = r"'messages' or 'prompt' and 'response'.*'prompt', 'answer'\. .*data\.response_key"
    with pytest.raises(ValueError, match=says):
        loader.sft({"prompt": "p", "answer": "a"})
    with pytest.raises(ValueError, match="no chat template"):
        Loader(tmp_path, Renderer(make_tokenizer(chat_template=None))).sft(CHAT)


LONG = {"prompt": "abcdef", "response": "xyz"}, {"prompt": "a", "response": "b"}  # 10 and 3 tokens


TRUNCATED = [
    (5, "left", "fxyz<|im_end|>", [0, 1, 1, 1, 1], [4]),
    (3, "left", "yz<|im_end|>", [0, 1, 1], [2]),  # the first token is never trained
    (8, "right", "abcdefxy", [0, 0, 0, 0, 0, 0, 1, 1], []),
]


@pytest.mark.parametrize(("max_length", "truncation", "text", "mask", "ends"), TRUNCATED)
def test_a_long_example_is_truncated(loader, max_length, truncation, text, mask, ends):
    row, _ = loader.sft(*LONG, max_length=max_length, truncation=truncation).examples
    assert (text_of(loader.renderer, row.token_ids), [*row.action_mask], row.turn_ends) == (text, mask, ends)


def test_a_long_example_is_an_error_by_default_and_dropped_if_no_trained_token_is_left(loader, tmp_path):
    with pytest.raises(ValueError, match=r"1 of 2 .*max_length=5.*row 0 with 10 "):
        loader.sft(*LONG, max_length=5)
    read = loader.sft(*LONG, max_length=5, truncation="right")
    assert len(read.examples) == 1 and "1 of 2 examples" in read.notices[0] and "(right)" in read.notices[0]
    long = {"messages": [USER, FOUR | {"content": "four" * 99}]}
    files = [write_rows(tmp_path / f"{name}.jsonl", [CHAT, row]) for name, row in (("a", CHAT), ("b", long))]
    (tmp_path / "data.jsonl").unlink()
    for entry in (files, str(tmp_path / "*.jsonl")):
        with pytest.raises(ValueError, match=r"The first is .*b\.jsonl, row 1 with"):
            load_examples(entry, loader.renderer, SftData(max_length=100, truncation="error"))


TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}{{ mark }}{% endfor %}{% for one in messages %}"
    "[{{ one.role }}]{{ one.content }}{% for call in one.tool_calls or [] %}{{ call.function | tojson }}"
    "{% endfor %}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def test_tools_and_variables_of_a_row_reach_the_template(tmp_path, make_tokenizer):
    call = {"name": "add", "arguments": '{"a": 1}'}
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": call}]}
    without_names = TEMPLATE.replace("call.function", "call.function.arguments")
    with pytest.raises(ValueError, match="tool calls of message 1"):
        Loader(tmp_path, Renderer(make_tokenizer(without_names))).sft({"messages": [USER, call]})
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    renderer = Renderer(make_tokenizer(TEMPLATE), {"mark": "?"})
    with_call, twice, without = (
        Loader(tmp_path, renderer)
        .sft(
            {"messages": [USER, call, {"role": "tool", "content": "3"}, FOUR], "tools": '[{"name": "add"}]'},
            CHAT | {"tools": [tool, tool], "chat_template_kwargs": {"mark": "!"}},
            CHAT | {"tools": None},
        )
        .examples
    )
    written = '{"name": "add", "arguments": {"a": 1}}<|im_end|>'
    shown = f"add?[user]2+2=?<|im_end|>[assistant]{written}[tool]3<|im_end|>[assistant]4<|im_end|>"
    assert text_of(renderer, with_call.token_ids) == shown
    assert trained(renderer, with_call) == [written, "4<|im_end|>"]
    starts = ((twice, "add!add![user]"), (without, "[user]"))
    assert all(text_of(renderer, row.token_ids).startswith(start) for row, start in starts)


def test_columns_that_are_not_read_are_listed_once(loader):
    found = loader.sft(CHAT | {"id": 1, "source": "x", "data_source": "y", "tools": None}, CHAT).findings
    assert [(one.content, one.rows, one.total) for one in found] == [
        ("the column 'id'", 1, 2),
        ("the column 'source'", 1, 2),
    ]
    assert loader.sft(CHAT | {"id": None}).findings == []
