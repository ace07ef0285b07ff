"""prepare_sft and prepare_preference, and prepare_informal_math on rows with solutions."""

from alphaapollo.data.chats import read_chat
from tests.builders import write_rows
from tests.unit.data_preprocess.scripts import DIRTY, GOOD, REASONS, check_counts, made


def roles(row):
    return [message["role"] for message in row["messages"]]


def test_sft_plain_and_with_tools(tmp_path):
    source = write_rows(tmp_path / "gsm8k_train.jsonl", [GOOD, *DIRTY])
    rows, said = made("prepare_sft", tmp_path, source)
    assert roles(rows[0]) == ["user", "assistant"] and rows[0]["messages"][1]["content"] == "1+1 = 2\n\\boxed{2}"
    assert "(3 assistant turns)" in said
    check_counts(said, 3, REASONS)
    rows, said = made("prepare_sft", tmp_path, source, "--protocol", "tools")
    assert roles(rows[0]) == ["user", "assistant", "user", "assistant"]
    assert rows[0]["extra_info"] == {"split": "train", "index": 0, "ground_truth": "2"}
    assert "(4 assistant turns): 3 rows kept" in said
    assert all(read_chat(row["messages"], "messages") for row in rows)


def test_sft_takes_chats_as_they_are(tmp_path):
    ask, answer = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
    calls = {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"a": 1}}]}
    chats = [
        *([ask, answer], [ask, answer | {"weight": 1}]),
        *([ask], [ask, answer | {"content": " "}]),  # no text
        *([1], [{"role": "user"}], "hi", [ask, answer | {"content": "\ud83d"}]),
        *([ask, answer | {"weight": 0}], [ask, answer | {"reasoning": "polite"}], [ask, calls]),  # more than a chat
    ]
    shared = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]}
    written, said = made("prepare_sft", tmp_path, [shared, *({"messages": chat} for chat in chats)])
    assert [row["messages"] for row in written] == [[ask, answer]] * 3
    reasons = {"no text": 2, "not a list": 1, "{role, content}": 2, "not valid Unicode": 1}
    check_counts(said, 3, {**reasons, "tool calls, thoughts or weights": 3})


MODELS = {
    "question": "A robe takes 2 bolts of blue fiber and half that much white. How many in all?",
    "ground_truth": "It takes 2/2=<<2/2=1>>1 bolt of white fiber\nSo it is 2+1=<<2+1=3>>3 bolts of fabric in all\nA: 3",
    "small_model": {"is_correct": True, "solution": "White is 1, so 2+1=<<2+1=3>>3\nA: 3"},
    "large_model": {"is_correct": False, "solution": "It takes 2*100=<<2*100=200>>200 meters\nA: 200"},
}
UNSOLVED = {**MODELS, "small_model": {"is_correct": False, "solution": "It is 5\nA: 5"}}


def test_sft_takes_the_solutions_that_are_labelled_as_right(tmp_path):
    rows, said = made("prepare_sft", tmp_path, [MODELS, UNSOLVED])
    assert [row["messages"][1]["content"] for row in rows] == ["White is 1, so 2+1=3\n\\boxed{3}"]
    assert rows[0]["extra_info"]["ground_truth"] == "3"
    check_counts(said, 1, {"no right solution": 1})


def test_preference_pairs(tmp_path):
    def solution(text, right):
        return {"solution": text, "is_correct": right}

    chat = [{"role": "user", "content": "hi"}]
    good, bad = {"role": "assistant", "content": "hello"}, {"role": "assistant", "content": "go"}
    rows = [
        {"question": "q", "answer": "2", "a": solution("1+1=<<1+1=2>>2", True), "b": solution("3", False)},
        {"question": "q", "solutions": [solution("a", 1), solution("b", True), solution("c", 0), solution("d", "no")]},
        {"prompt": "p", "chosen": "x", "rejected": "y"},
        {"chosen": [*chat, good], "rejected": [*chat, bad]},
        {"question": "q", "a": solution("2", True), "b": solution("2", False)},
        {"prompt": "p", "chosen": "x", "rejected": "x"},
        {"prompt": "p", "chosen": "x"},
        {"chosen": "x", "rejected": "y"},
        {"chosen": [*chat, good], "rejected": [{"role": "user", "content": "ho"}, bad]},
        *DIRTY,
    ]
    written, said = made("prepare_preference", tmp_path, rows)
    short = [
        (row["extra_info"]["index"], row["chosen"][0]["content"], row["rejected"][0]["content"]) for row in written
    ]
    assert short == [(0, "1+1=2", "3"), (1, "a", "c"), (1, "b", "c"), (2, "x", "y"), (3, "hello", "go")]
    assert written[0]["prompt"] == [{"role": "user", "content": "q"}] and written[4]["prompt"] == chat
    assert written[0]["extra_info"]["ground_truth"] == "2"
    assert "(5 pairs)" in said
    reasons = {"a right and a wrong": 1, "the same": 1, "rejected answer (": 1, "no question": 1, "different": 1}
    check_counts(said, 4, {"labelled solutions": 7, "not valid Unicode": 1, **reasons})
