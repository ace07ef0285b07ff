"""Pairs and labelled answers, in the formats of this project, TRL and ms-swift."""

import json

import pytest

from alphaapollo.data.preference_examples import make_unrelated_answers
from tests.unit.data.rows import EARLIER, FIVE, FOUR, IM_END, SYSTEM, USER, trained

ANSWERS = {"chosen": "4", "rejected": "it is 5"}
PAIR = ANSWERS | {"prompt": [USER]}
OTHER = {"role": "user", "content": "3+3=?"}
REJECTED = {"rejected_response": "it is 5"}  # of ms-swift
WITH_CONTEXT = [SYSTEM, *EARLIER, USER]
GPT = {name: {"from": "gpt", "value": text} for name, text in (("chosen", "4"), ("rejected", "it is 5"))}
CONTEXT_COLUMNS = {"system": "be kind", "history": [["1+1=?", "2"]]}


PAIRS = [
    ({"prompt": [USER], "chosen": [FOUR], "rejected": [FIVE]}, [USER]),
    (PAIR, [USER]),
    ({"chosen": [USER, FOUR], "rejected": [USER, FIVE]}, [USER]),
    ({"prompt": "2+2=?", "chosen": [USER, FOUR], "rejected": [USER, FIVE]}, [USER]),
    ({"question": [USER], **GPT}, [USER]),
    (PAIR | {"prompt": "2+2=?", "system": "be kind"}, [SYSTEM, USER]),
    ({"messages": [USER, FOUR], **REJECTED}, [USER]),
    ({"messages": [USER, FOUR], "rejected_response": [FIVE], "margin": 2.0}, [USER]),
    ({"messages": [USER, FOUR], "rejected_messages": [USER, FIVE]}, [USER]),
    ({"query": "2+2=?", "response": "4", **REJECTED}, [USER]),
    ({"query": "2+2=?", "response": "4", **REJECTED, **CONTEXT_COLUMNS}, WITH_CONTEXT),
    ({"messages": [*WITH_CONTEXT, FOUR], **REJECTED}, WITH_CONTEXT),
    (PAIR | {"chosen": json.dumps(FOUR), "rejected": json.dumps([FIVE])}, [USER]),
    ({"query": json.dumps([USER]), "response": json.dumps(FOUR), "rejected_response": json.dumps([FIVE])}, [USER]),
    (ANSWERS | {"instruction": "2+2=?", "input": ""}, [USER]),
]


@pytest.mark.parametrize(("row", "prompt"), PAIRS)
def test_all_ways_to_write_a_pair_give_the_same_tokens(loader, row, prompt):
    read = loader.pairs(row | {"data_source": "sums"})
    (pair,) = read.examples
    ids, encode = loader.renderer.encode_prompt(prompt), loader.renderer.encode
    assert [[*one.token_ids] for one in pair.rows] == [[*ids, *encode([text])[0], IM_END] for text in ("4", "it is 5")]
    for one in pair.rows:
        assert one.response_start == len(ids) and [*one.action_mask[len(ids) :]] == [1] * (
            len(one.token_ids) - len(ids)
        )
    assert (pair.is_good, pair.data_source, pair.unrelated_answer) == ([True, False], "sums", None)
    assert pair.margin == row.get("margin", 0.0)
    assert pair.longest_row_length == len(pair.rows[1].token_ids) and read.file_sizes == [1]
    assert any(one.effect != "read as chats" for one in read.findings) == ("prompt" not in row)


def test_other_columns_of_a_pair(loader):
    (pair,) = loader.pairs(PAIR).examples
    row = {"prompt": [USER], "best": "4", "worst": "it is 5"}
    assert loader.pairs(row, chosen_key="best", rejected_key="worst").examples == [pair]
    with pytest.raises(ValueError, match="'worse'"):
        loader.pairs(row, chosen_key="best", rejected_key="worse")


def test_system_prompt_of_all_rows(loader):
    rows = [PAIR, PAIR | {"prompt": "2+2=?"}, {"chosen": [USER, FOUR], "rejected": [USER, FIVE]}]
    rows.append(PAIR | {"prompt": [SYSTEM, USER]})
    pairs = loader.pairs(*rows, system_prompt=SYSTEM["content"]).examples
    assert len({tuple(pair.rows[0].token_ids) for pair in pairs}) == 1
    chosen = pairs[0].rows[0]
    assert [*chosen.token_ids[: chosen.response_start]] == loader.renderer.encode_prompt([SYSTEM, USER])


def test_common_start_of_chats_is_not_trained_on(loader):
    chat = [SYSTEM, USER, FOUR, USER]
    (pair,) = loader.pairs({"chosen": [*chat, FOUR, USER, FOUR], "rejected": [*chat, FIVE]}).examples
    chosen, rejected = pair.rows
    assert [*chosen.token_ids[: chosen.response_start]] == loader.renderer.encode_prompt(chat)
    assert trained(loader.renderer, rejected) == ["it is 5<|im_end|>"]
    assert trained(loader.renderer, chosen) == ["4<|im_end|>", "4<|im_end|>"]  # the user between them is left out


def test_texts_end_with_eos_and_may_begin_with_their_prompt(loader):
    (pair,) = (read := loader.pairs({"prompt": "2+2=", "chosen": "4", "rejected": "5", "margin": 1.5})).examples
    assert [trained(loader.renderer, row) for row in pair.rows] == [["4<|im_end|>"], ["5<|im_end|>"]]
    assert pair.margin == 1.5 and "2 prompts are texts" in read.notices[0]
    joined = {"chosen": "Human: 2+2?\nAssistant: fo", "rejected": "Human: 2+2?\nAssistant: five"}
    own = {"prompt": "Human: 2+2?\nAssistant:", "chosen": " fo", "rejected": " five"}
    assert loader.pairs(joined).examples == loader.pairs(own).examples


BAD_ROWS = [
    (PAIR | {"rejected": "4"}, "'rejected' are equal"),
    (PAIR | {"chosen": [FOUR]}, "must both be text"),
    ({"prompt": "2+2", "chosen": [FOUR], "rejected": [FIVE]}, "'prompt' is text, "),
    ({"chosen": "4", "rejected": "5"}, "there is no 'prompt'"),
    ({"chosen": "The 4", "rejected": "The 5", "post": "What is 2+2?"}, "'post' has more words"),
    (PAIR | {"prompt": [USER, FOUR]}, "'prompt' ends with an assistant"),
    ({"chosen": [USER, FOUR], "rejected": [SYSTEM, USER, FIVE]}, "answer different prompts"),
    (PAIR | {"margin": -1}, "'margin' is -1"),
]


@pytest.mark.parametrize(("row", "says"), BAD_ROWS)
def test_bad_rows_are_named(loader, row, says):
    with pytest.raises(ValueError, match=rf"1 of 2 rows.*\n.*row 1: .*{says}"):
        loader.pairs(PAIR, row)


def test_long_pairs_are_an_error_or_are_dropped(loader):
    rows = [PAIR | {"rejected": "5"}, PAIR | {"rejected": "5" * 60}]
    with pytest.raises(ValueError, match=r"1 of 2 pairs .*data\.max_length=60"):
        loader.pairs(*rows, max_length=60)
    read = loader.pairs(*rows, max_length=60, truncation="drop")
    assert len(read.examples) == 1 and read.file_sizes == [1]
    assert "1 of 2 pairs" in read.notices[0] and "dropped" in read.notices[0]


def test_labelled_answers_are_read_directly(loader):
    rows = [{"prompt": [USER], "completion": [FOUR], "label": True}, {"prompt": "3", "completion": "5", "label": False}]
    read = loader.labelled(*rows)
    assert read.examples == loader.labelled(*({**row, "response": row["completion"]} for row in rows)).examples
    assert "prompt, completion, label" in read.findings[0].content
    chats = [{"messages": [USER, FOUR], "label": True}, {"messages": [EARLIER[0], FIVE], "label": False}]
    own = [{"prompt": [USER], "response": "4", "label": 1}, {"prompt": EARLIER[:1], "response": [FIVE], "label": 0}]
    assert loader.labelled(*chats).examples == loader.labelled(*own).examples


def test_single_answers_and_pairs_as_two_of_them(loader):
    good, bad = loader.labelled(
        {"prompt": [USER], "response": "4", "label": True, "data_source": "a"},
        {"prompt": [OTHER], "response": [FIVE], "label": 0},
    ).examples
    assert (good.is_good, bad.is_good, good.data_source) == ([True], [False], "a")
    answers = loader.labelled(PAIR, PAIR | {"prompt": [OTHER]}).examples
    assert [answer.is_good for answer in answers] == [[True], [False], [True], [False]]
    assert answers[0].rows[0].token_ids == good.rows[0].token_ids
    # The answers to the other prompt are "4" and "it is 5": either may be the unrelated one.
    for answer in answers:
        assert trained(loader.renderer, answer.unrelated_answer) in (["4<|im_end|>"], ["it is 5<|im_end|>"])
        start = answer.rows[0].response_start
        assert answer.unrelated_answer.token_ids[:start] == answer.rows[0].token_ids[:start]


def test_labels_of_one_kind_and_no_labels(loader):
    row = {"prompt": [USER], "response": "4", "label": True}
    for other, what in (
        ({}, "all 2 answers are desirable"),
        ({"label": "good"}, "row 1: 'label' is 'good'"),
        ({"label": False}, "all prompts .*equal"),
    ):
        with pytest.raises(ValueError, match=what):
            loader.labelled(row, row | other)


def test_unrelated_answers_are_of_other_prompts_drawn_by_the_seed(loader):
    questions = [{"role": "user", "content": f"{number // 3}?"} for number in range(12)]
    rows = [{"prompt": [one], "response": f"{n}", "label": bool(n % 2)} for n, one in enumerate(questions)]
    own = [answer.rows[0] for answer in loader.labelled(*rows).examples]
    for place, row in enumerate(make_unrelated_answers(own, 0, 2048)):
        (text,) = trained(loader.renderer, row)
        assert int(text.removesuffix("<|im_end|>")) // 3 != place // 3
        assert row.token_ids[: row.response_start] == own[place].token_ids[: own[place].response_start]
    drawn = [[row.token_ids for row in make_unrelated_answers(own, seed, 2048)] for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    start = own[0].response_start
    assert {len(row.token_ids) for row in make_unrelated_answers(own, 0, start + 1)} == {start + 1}
