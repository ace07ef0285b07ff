import pytest

from alphaapollo.config.schema import PreferenceData, RewardData
from alphaapollo.data.preference_examples import load_preferences, make_unrelated_answers
from tests.builders import write_rows

SYSTEM = {"role": "system", "content": "be kind"}
USER = {"role": "user", "content": "2+2=?"}
FOUR = {"role": "assistant", "content": "4"}
FIVE = {"role": "assistant", "content": "it is 5"}
IM_END = 1


def write(tmp_path, rows):
    return write_rows(tmp_path / "data.jsonl", rows)


def pairs(tmp_path, renderer, rows, **data):
    return load_preferences(write(tmp_path, rows), renderer, RewardData(**data))


def labelled(tmp_path, renderer, rows, **data):
    return load_preferences(write(tmp_path, rows), renderer, PreferenceData(**data), single_answers=True)


def extract_answer(renderer, row):
    kept = [token for token, mask in zip(row.token_ids, row.action_mask, strict=True) if mask]
    return renderer.tokenizer.decode(kept, skip_special_tokens=False)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER], "chosen": [FOUR], "rejected": [FIVE]},
        {"prompt": [USER], "chosen": "4", "rejected": "it is 5"},
        {"chosen": [USER, FOUR], "rejected": [USER, FIVE]},
        {"prompt": "2+2=?", "chosen": [USER, FOUR], "rejected": [USER, FIVE]},
        {"conversations": [{"from": "human", "value": "2+2=?"}], "chosen": FOUR, "rejected": FIVE},
        {"question": [USER], "chosen": {"from": "gpt", "value": "4"}, "rejected": {"from": "gpt", "value": "it is 5"}},
        {"prompt": '[{"role": "user", "content": "2+2=?"}]', "chosen": "4", "rejected": "it is 5"},
    ],
)
def test_all_ways_to_write_a_pair_give_the_same_tokens(tmp_path, renderer, row):
    read = pairs(tmp_path, renderer, [row | {"data_source": "sums"}])
    (pair,) = read.examples
    prompt = renderer.encode_prompt([USER])
    chosen, rejected = pair.rows
    assert chosen.token_ids == [*prompt, *renderer.encode(["4"])[0], IM_END]
    assert rejected.token_ids == [*prompt, *renderer.encode(["it is 5"])[0], IM_END]
    for one in pair.rows:
        assert one.response_start == len(prompt) and sum(one.action_mask) == len(one.token_ids) - len(prompt)
    assert (pair.is_good, pair.data_source, pair.margin, pair.unrelated_answer) == ([True, False], "sums", 0.0, None)
    assert pair.longest_row_length == len(rejected.token_ids) and (read.file_sizes, read.notices) == ([1], [])


def test_common_start_of_chats_is_not_trained_on(tmp_path, renderer):
    chat = [SYSTEM, USER, FOUR, USER]
    (pair,) = pairs(tmp_path, renderer, [{"chosen": [*chat, FOUR, USER, FOUR], "rejected": [*chat, FIVE]}]).examples
    chosen, rejected = pair.rows
    assert chosen.token_ids[: chosen.response_start] == renderer.encode_prompt(chat)
    assert extract_answer(renderer, rejected) == "it is 5<|im_end|>"
    assert extract_answer(renderer, chosen) == "4<|im_end|>4<|im_end|>"  # the user between them is left out


def test_texts_end_with_eos(tmp_path, renderer):
    (pair,) = pairs(tmp_path, renderer, [{"prompt": "2+2=", "chosen": "4", "rejected": "5", "margin": 1.5}]).examples
    assert [extract_answer(renderer, row)[0] for row in pair.rows] == ["4", "5"]
    assert pair.margin == 1.5


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": [USER], "chosen": "4", "rejected": "4"}, "'rejected' are equal"),
        ({"prompt": [USER], "chosen": "4", "rejected": " "}, "'rejected' is empty"),
        ({"prompt": [USER], "chosen": [], "rejected": "5"}, "'chosen'"),
        ({"prompt": [USER], "chosen": [FOUR], "rejected": "5"}, "must both be text"),
        ({"prompt": "2+2", "chosen": [FOUR], "rejected": [FIVE]}, "'prompt' is text, "),
        ({"prompt": [], "chosen": "4", "rejected": "5"}, "'prompt' is empty"),
        ({"chosen": "4", "rejected": "5"}, "there is no 'prompt'"),
        ({"prompt": [USER, FOUR], "chosen": "4", "rejected": "5"}, "'prompt' ends with an assistant"),
        ({"chosen": [USER, FOUR], "rejected": [SYSTEM, USER, FIVE]}, "answer different prompts"),
        ({"chosen": [USER, FOUR], "rejected": [USER, FOUR, USER, FIVE]}, "answer different prompts"),
        ({"chosen": [USER, FOUR, USER], "rejected": [USER, FIVE]}, "roles assistant and user"),
        ({"prompt": [USER], "chosen": "4", "rejected": "5", "margin": -1}, "'margin' is -1"),
        ({"prompt": [USER], "chosen": "4", "rejected": "5", "margin": "much"}, "'margin' is 'much'"),
    ],
)
def test_bad_rows_are_named(tmp_path, renderer, row, says):
    good = {"prompt": [USER], "chosen": "4", "rejected": "5"}
    with pytest.raises(ValueError, match=rf"1 of 2 rows.*\n.*row 1: .*{says}"):
        pairs(tmp_path, renderer, [good, row])


def test_other_columns_are_reported(tmp_path, renderer):
    with pytest.raises(ValueError, match=r"'chosen' and 'rejected'.*'answer'"):
        pairs(tmp_path, renderer, [{"prompt": [USER], "answer": "4"}])
    with pytest.raises(ValueError, match=r"alphaapollo dpo preference\.loss=kto"):
        path = write(tmp_path, [{"prompt": [USER], "completion": "4", "label": True}])
        load_preferences(path, renderer, PreferenceData())
    with pytest.raises(ValueError, match="'rejected' have no common beginning"):
        pairs(tmp_path, renderer, [{"chosen": "four", "rejected": "five"}])
    with pytest.raises(ValueError, match="'response' and 'label' or 'chosen'"):
        labelled(tmp_path, renderer, [{"prompt": [USER], "answer": "4"}])


def test_long_pairs_are_an_error_or_are_dropped(tmp_path, renderer):
    rows = [{"prompt": [USER], "chosen": "4", "rejected": "5"}, {"prompt": [USER], "chosen": "4", "rejected": "5" * 60}]
    with pytest.raises(ValueError, match=r"1 of 2 pairs .*data\.max_length=60"):
        pairs(tmp_path, renderer, rows, max_length=60)
    read = pairs(tmp_path, renderer, rows, max_length=60, truncation="drop")
    assert len(read.examples) == 1 and read.file_sizes == [1]
    assert "1 of 2 pairs" in read.notices[0] and "dropped" in read.notices[0]


def test_texts_without_a_prompt_begin_with_it(tmp_path, renderer):
    row = {"chosen": "Human: 2+2?\nAssistant: fo", "rejected": "Human: 2+2?\nAssistant: five"}
    own = {"prompt": "Human: 2+2?\nAssistant:", "chosen": " fo", "rejected": " five"}
    assert pairs(tmp_path, renderer, [row]).examples == pairs(tmp_path, renderer, [own]).examples


def test_completions_with_labels_are_read_directly(tmp_path, renderer):
    rows = [{"prompt": [USER], "completion": [FOUR], "label": True}, {"prompt": "3", "completion": "5", "label": False}]
    own = [{**row, "response": row["completion"]} for row in rows]
    read = labelled(tmp_path, renderer, rows)
    assert read.examples == labelled(tmp_path, renderer, own).examples
    assert "(prompt, completion, label)" in read.notices[0]


def test_single_answers_and_pairs_as_two_of_them(tmp_path, renderer):
    other = {"role": "user", "content": "3+3=?"}
    single = [
        {"prompt": [USER], "response": "4", "label": True, "data_source": "a"},
        {"prompt": [other], "response": [FIVE], "label": 0},
    ]
    good, bad = labelled(tmp_path, renderer, single).examples
    assert (good.is_good, bad.is_good, good.data_source) == ([True], [False], "a")
    pair = {"prompt": [USER], "chosen": "4", "rejected": "it is 5"}
    answers = labelled(tmp_path, renderer, [pair, pair | {"prompt": [other]}]).examples
    assert [answer.is_good for answer in answers] == [[True], [False], [True], [False]]
    assert answers[0].rows[0].token_ids == good.rows[0].token_ids
    # The answers to the other prompt are "4" and "it is 5": either may be the unrelated one.
    for answer in answers:
        assert extract_answer(renderer, answer.unrelated_answer) in ("4<|im_end|>", "it is 5<|im_end|>")
        start = answer.rows[0].response_start
        assert answer.unrelated_answer.token_ids[:start] == answer.rows[0].token_ids[:start]


def test_labels_of_one_kind_and_no_labels(tmp_path, renderer):
    row = {"prompt": [USER], "response": "4", "label": True}
    for other, what in (
        ({}, "all 2 answers are desirable"),
        ({"label": "good"}, "row 1: 'label' is 'good'"),
        ({"label": False}, "all prompts .*equal"),
    ):
        with pytest.raises(ValueError, match=what):
            labelled(tmp_path, renderer, [row, row | other])


def test_unrelated_answers_are_of_other_prompts_drawn_by_the_seed(tmp_path, renderer):
    rows = [
        {"prompt": [{"role": "user", "content": f"{n // 3}?"}], "response": f"{n}", "label": bool(n % 2)}
        for n in range(12)
    ]
    answers = labelled(tmp_path, renderer, rows).examples
    own = [answer.rows[0] for answer in answers]
    for place, row in enumerate(make_unrelated_answers(own, 0, 2048)):
        number = int(extract_answer(renderer, row).removesuffix("<|im_end|>"))
        assert number // 3 != place // 3
        assert row.token_ids[: row.response_start] == own[place].token_ids[: own[place].response_start]
    drawn = [[row.token_ids for row in make_unrelated_answers(own, seed, 2048)] for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    start = own[0].response_start
    assert {len(row.token_ids) for row in make_unrelated_answers(own, 0, start + 1)} == {start + 1}


THINKING = (
    "{% for one in messages %}<|im_start|>{{ one.role }}\n{% if one.reasoning_content and loop.last %}<think>"
    "{{ one.reasoning_content }}</think>{% endif %}{{ one.content }}{% for call in one.tool_calls or [] %}"
    "{{ call.function.name }}()<tools>{{ tools | length }}</tools>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [{"name": "f", "arguments": {}}]}


def test_answers_of_thinking_models_with_calls(tmp_path, make_tokenizer):
    """The prompt is as at inference, without earlier thoughts. The turns of an answer keep theirs in one example."""
    from alphaapollo.data.rendering import Renderer

    renderer = Renderer(make_tokenizer(THINKING))
    earlier, four = {**FOUR, "reasoning": "before"}, {**FOUR, "reasoning": "so"}
    row = {
        "system": "be kind",
        "prompt": [USER, earlier, USER],
        "chosen": [CALL, {"role": "tool", "content": "3"}, four],
        "rejected": [FIVE | {"thinking": "no"}],
        "tools": [{"name": "f"}],
        "note": "x",
    }
    read = pairs(tmp_path, renderer, [row])
    chosen, rejected = read.examples[0].rows
    assert (
        extract_answer(renderer, chosen) == "<think>hm</think>f()<tools>1</tools><|im_end|><think>so</think>4<|im_end|>"
    )
    assert extract_answer(renderer, rejected) == "<think>no</think>it is 5<|im_end|>"
    prompt = renderer.tokenizer.decode(chosen.token_ids[: chosen.response_start], skip_special_tokens=False)
    assert prompt == renderer.render_chat([SYSTEM, USER, FOUR, USER])
    assert chosen.token_ids[: chosen.response_start] == rejected.token_ids[: rejected.response_start]
    assert [notice.partition(":")[2] for notice in read.notices] == [" Columns that are not read: note."]
    (good, _) = labelled(
        tmp_path,
        renderer,
        [row | {"response": row["chosen"], "label": True}, {"prompt": [SYSTEM, USER], "response": "4", "label": False}],
    ).examples
    assert good.rows[0].token_ids == chosen.token_ids


def test_a_text_prompt_with_a_system_message_is_a_chat(tmp_path, renderer):
    row = {"system": "be kind", "prompt": "2+2=?", "chosen": "4", "rejected": "5"}
    own = {"prompt": [SYSTEM, USER], "chosen": "4", "rejected": "5"}
    assert pairs(tmp_path, renderer, [row]).examples == pairs(tmp_path, renderer, [own]).examples
    texts = pairs(tmp_path, renderer, [{"prompt": "2+2=", "chosen": "4", "rejected": "5"}])
    assert "2 prompts are plain texts" in texts.notices[0]
